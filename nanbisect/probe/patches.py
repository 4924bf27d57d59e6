"""Where the probe holds on to torch. Every wrapper calls what it wraps with the same arguments.

Never `register_full_backward_hook`: it changes the order in which gradients of branches are added. An
error of ours is written down and swallowed; an error of the training's own goes through untouched.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import types
from multiprocessing import util
from typing import Any, Callable

import torch
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.utils.data import get_worker_info

from .guard import Guard
from .inputs import call_arguments
from .libraries import install_libraries
from .loading import install_loaders
from .observer import TEXT, Observer
from .phase import compiling, inside_backward
from .scaling import absorbed, install_scaler
from .unhanded import install_questions

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")


class Depth(threading.local):
    """How many forwards of modules are at work on this thread, one inside the other."""

    value = 0


def install(observer: Observer) -> Guard:
    """Patch this process once."""
    guard = Guard(observer)
    observer.arrivals.guarded_arrived = guard(observer.arrivals.arrived, "gradient")
    observer.arrivals.guarded_use = guard(observer.arrivals.use_arrived, "gradient of a tied weight")
    _backward(observer, guard)
    _leaf_hooks(observer, guard)
    _swap(observer)
    _forward(observer, guard)
    _optimizer(observer, guard)
    _clipping(observer, guard)
    install_scaler(observer, guard)
    install_loaders(observer, guard)
    install_questions(guard(observer.asked, "loss"), compiling)
    _endings(observer, guard)
    os.register_at_fork(after_in_child=guard(observer.forked, "fork"))
    observer.stopper.finish = guard(observer.finish, "at exit")
    atexit.register(observer.stopper.finish)
    util.register_after_fork(observer, lambda _: util.Finalize(None, observer.stopper.finish, exitpriority=0))
    return guard


def _backward(observer: Observer, guard: Guard) -> None:
    real: Any = torch.autograd.backward
    enter, leave = guard(observer.backward, "backward"), guard(observer.leave, "after backward")
    raised = guard(observer.raised, "after backward")

    @functools.wraps(real)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if compiling():
            real(tensors, *args, **kwargs)
            return
        nested, create_graph = inside_backward(), bool(args[2] if len(args) > 2 else kwargs.get("create_graph"))
        if isinstance(tensors, torch.Tensor) or hasattr(tensors, "node"):  # a tensor or a gradient edge
            hooks = enter([tensors], nested, create_graph)
        else:
            tensors = tuple(tensors)  # as torch itself does: a generator can be read once
            hooks = enter(tensors, nested, create_graph)
        try:
            with observer.traced():
                real(tensors, *args, **kwargs)
        except Exception as error:
            if not nested:
                raised(error)
            raise
        finally:
            leave(hooks, nested)

    torch.autograd.backward = backward


def _endings(observer: Observer, guard: Guard) -> None:
    """The ways in which a script ends by itself while what it saw is still there."""
    leaving, died, finish = (guard(work, "at exit") for work in (observer.leaving, observer.died, observer.finish))
    real_exit, real_now, real_hook = sys.exit, os._exit, threading.excepthook

    @functools.wraps(real_exit)
    def leave(*status: Any) -> Any:
        leaving()
        real_exit(*status)

    @functools.wraps(real_now)
    def leave_now(*status: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # a watchdog's thread must not wait for a device
            finish()
        real_now(*status, **named)

    def excepthook(args: Any, /) -> Any:
        died(repr(args.exc_value)[:TEXT])
        return real_hook(args)

    sys.exit, os._exit, threading.excepthook = leave, leave_now, excepthook


def _leaf_hooks(observer: Observer, guard: Guard) -> None:
    """A hook of the script may step and drop the gradient: ours is registered before it."""
    real: Any = torch.Tensor.register_post_accumulate_grad_hook
    hook = guard(observer.arrivals.hook, "hook")

    @functools.wraps(real)
    def register_post_accumulate_grad_hook(self: torch.Tensor, function: Any) -> Any:
        hook(self)
        return real(self, function)

    torch.Tensor.register_post_accumulate_grad_hook = register_post_accumulate_grad_hook  # type: ignore[method-assign]


def _swap(observer: Observer) -> None:
    """torch refuses to swap a tensor that has weak references: ours step aside."""
    real = getattr(torch.utils, "swap_tensors", None)
    if real is None:  # torch 2.1
        return

    @functools.wraps(real)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> Any:
        with observer.handles.released(t1, t2):
            return real(t1, t2)

    torch.utils.swap_tensors = swap_tensors


def _forward(observer: Observer, guard: Guard) -> None:
    """Only the outermost module is looked at. The hooks of all others count depth and time themselves, cheaply."""
    depth, clock, now, task = Depth(), observer.clock, time.perf_counter, torch._C._current_graph_task_id
    settle, root = guard(observer.end_without_step, "forward"), guard(observer.forward, "forward")
    returned, gathered = guard(observer.returned, "forward"), guard(observer.gathered, "names")

    def before(module: torch.nn.Module, args: Any) -> None:
        if compiling():
            return
        began = now()
        if task() != -1:
            observer.window.recomputed += 1
            clock.seconds += now() - began
            return
        inside = depth.value
        if not inside and module.training and torch.is_grad_enabled() and get_worker_info() is None:
            settle()
            observer.stop_if_due()  # before the count of depth: it may raise
            root(module, *call_arguments(args))
            began = now()  # these have counted themselves
        depth.value = inside + 1
        clock.seconds += now() - began

    def after(module: torch.nn.Module, _: Any, output: Any) -> None:
        if compiling():
            return
        if id(module) in observer.sharded:
            gathered(module)
        began = now()
        outermost = False
        if task() == -1:
            depth.value = max(0, depth.value - 1)
            outermost = not depth.value and module.training and torch.is_grad_enabled()
        clock.seconds += now() - began
        if outermost:
            returned(module, output)

    modules.register_module_forward_pre_hook(before)
    modules.register_module_forward_hook(after, always_call=True)


def _optimizer(observer: Observer, guard: Guard) -> None:
    steps = observer.steps
    before, after = guard(steps.before_step, "before the step"), guard(steps.stepped, "after the step")
    scale, skipped = guard(steps.judge_scaled, "scaler"), guard(steps.skipped, "scaler")
    was_absorbed = guard(absorbed, "scaler")

    def pre(optimizer: Any, args: Any, kwargs: Any) -> None:
        scaler = steps.scaler() if steps.scaler is not None else None
        if scaler is not None and hasattr(optimizer, "found_inf"):  # fused: the scaler leaves the decision to it
            scale(scaler)
        before(optimizer)
        observer.doing("optimizer")

    def post(optimizer: Any, args: Any, kwargs: Any) -> None:
        observer.doing(None)
        (skipped if was_absorbed(optimizer) else after)(optimizer)

    optimizers.register_optimizer_step_pre_hook(pre)
    optimizers.register_optimizer_step_post_hook(post)


def _clipping(observer: Observer, guard: Guard) -> None:
    inside = threading.local()
    wrap = functools.partial(_wrap_clip, observer, guard, inside)
    for name in CLIPS:
        function = getattr(clip_grad, name, None)  # the last is not in torch 2.1
        if function is not None:
            _replace(function, functools.partial(wrap, name.lstrip("_")))
    total = getattr(clip_grad, "_get_total_norm", None)
    if total is not None:
        _replace(total, functools.partial(_wrap_norm, observer, inside))
    install_libraries(observer, guard, wrap)


def _wrap_clip(
    observer: Observer, guard: Guard, inside: threading.local, name: str, inner: Callable[..., Any]
) -> Callable[..., Any]:
    judge, clipped = guard(observer.steps.judge, name), guard(observer.steps.clipped, name)

    @functools.wraps(inner)
    def clip(*args: Any, **kwargs: Any) -> Any:
        if compiling() or getattr(inside, "clip", False):  # clip_grad_norm_ calls clip_grads_with_norm_
            return inner(*args, **kwargs)
        limit, norm = _limit(args, kwargs), None
        judge()
        inside.clip, raised = True, True
        observer.doing("clip")
        try:
            result = inner(*args, **kwargs)
            raised = False
        finally:
            inside.clip = False
            observer.doing(None)
            if not raised:
                norm = result if result is not None else _given_norm(name, args, kwargs)
            clipped(name, limit, norm, raised)
        return result

    return clip


def _wrap_norm(observer: Observer, inside: threading.local, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A script that takes the norm by itself, to clip later or not at all."""

    @functools.wraps(inner)
    def get_total_norm(*args: Any, **kwargs: Any) -> Any:
        norm = inner(*args, **kwargs)
        if not (compiling() or getattr(inside, "clip", False) or inside_backward()):
            observer.window.norm = norm
        return norm

    return get_total_norm


def _limit(args: Any, kwargs: Any) -> float | None:
    limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
    return float(limit) if isinstance(limit, (int, float)) else None


def _given_norm(name: str, args: Any, kwargs: Any) -> Any:
    """clip_grads_with_norm_ returns nothing: the norm is an argument."""
    if name != "clip_grads_with_norm_":
        return None
    return args[2] if len(args) > 2 else kwargs.get("total_norm")


def _replace(function: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Swap what runs inside an imported function, so that every holder of its name follows."""
    cell = next((c for c in function.__closure__ or () if callable(c.cell_contents)), None)
    if cell is not None:  # torch wraps it in `_no_grad`: replace the function inside
        cell.cell_contents = wrap(cell.cell_contents)
        return
    kept = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    kept.__kwdefaults__ = function.__kwdefaults__
    name = "_nanbisect_" + function.__name__
    function.__globals__[name] = wrap(kept)
    source = "def trampoline(*args, **kwargs): return %s(*args, **kwargs)" % name
    scope: dict[str, Any] = {}
    exec(source, function.__globals__, scope)  # the code must live in the function's own globals
    function.__code__ = scope["trampoline"].__code__
    function.__defaults__ = function.__kwdefaults__ = None
