"""Where the probe holds on to torch. Every wrapper calls what it wraps with the same arguments.

Never `register_full_backward_hook`: it changes the order in which gradients of branches are added. An
error of ours is written down and swallowed; an error of the training's own goes through untouched.
"""

from __future__ import annotations

import atexit
import functools
import threading
import types
import weakref

import torch
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers


def install(observer):
    """Patch this process once."""
    guard = Guard(observer)
    observer.guarded_arrived = guard(observer.arrived, "gradient")
    _backward(observer, guard)
    _leaf_hooks(observer, guard)
    _forward(observer, guard)
    _optimizer(observer, guard)
    _clipping(observer, guard)
    _scaler(observer, guard)
    atexit.register(guard(observer.end, "at exit"), "exit")


class Guard:
    """Wraps the probe's own work: timed, and never able to break the training."""

    def __init__(self, observer):
        self.observer = observer

    def __call__(self, work, where):
        """`work`, with its errors written to the journal."""

        @functools.wraps(work)
        def guarded(*args):
            with self.observer.clock:
                try:
                    return work(*args)
                except Exception as error:  # noqa: BLE001 - the training must go on
                    self.observer.journal.write("probe_error", where=where, error=repr(error))

        return guarded


def _backward(observer, guard):
    real = torch.autograd.backward
    enter = guard(observer.backward, "backward")

    @functools.wraps(real)
    def backward(tensors, *args, **kwargs):
        nested = torch._C._current_graph_task_id() != -1
        enter([tensors] if isinstance(tensors, torch.Tensor) else list(tensors), nested)
        return real(tensors, *args, **kwargs)

    torch.autograd.backward = backward


def _leaf_hooks(observer, guard):
    """A hook of the script may step and drop the gradient: ours is registered before it."""
    real = torch.Tensor.register_post_accumulate_grad_hook
    hook = guard(observer.hook, "hook")

    @functools.wraps(real)
    def register_post_accumulate_grad_hook(self, function):
        hook(self)
        return real(self, function)

    torch.Tensor.register_post_accumulate_grad_hook = register_post_accumulate_grad_hook


def _forward(observer, guard):
    depth = threading.local()
    root = guard(observer.forward, "forward")

    def before(module, _):
        if torch._C._current_graph_task_id() != -1:
            observer.window.recomputed += 1
            return
        depth.value = getattr(depth, "value", 0) + 1
        if depth.value == 1 and module.training and torch.is_grad_enabled():
            root(module)

    def after(module, _, output):
        if torch._C._current_graph_task_id() == -1:
            depth.value = max(0, getattr(depth, "value", 0) - 1)

    modules.register_module_forward_pre_hook(before)
    modules.register_module_forward_hook(after, always_call=True)


def _optimizer(observer, guard):
    before, after = guard(observer.before_step, "before the step"), guard(observer.end, "after the step")

    def pre(optimizer, args, kwargs):
        before(optimizer)

    def post(optimizer, args, kwargs):
        if not _absorbed(optimizer):
            after("step")

    optimizers.register_optimizer_step_pre_hook(pre)
    optimizers.register_optimizer_step_post_hook(post)


def _absorbed(optimizer):
    """A fused optimizer under a GradScaler runs and moves nothing: the scaler's wrapper ends the step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _clipping(observer, guard):
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        _replace(getattr(clip_grad, name), functools.partial(_wrap_clip, observer, guard, name))


def _wrap_clip(observer, guard, name, inner):
    judge, clipped = guard(observer.judge, name), guard(observer.clipped, name)

    @functools.wraps(inner)
    def clip(parameters, *args, **kwargs):
        limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        limit = float(limit) if isinstance(limit, (int, float)) else None
        judge()
        try:
            norm = inner(parameters, *args, **kwargs)
        except RuntimeError:
            clipped(name, limit, None, True)
            raise
        clipped(name, limit, norm, False)
        return norm

    return clip


def _replace(function, wrap):
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
    scope = {}
    exec(source, function.__globals__, scope)
    function.__code__ = scope["trampoline"].__code__
    function.__defaults__ = function.__kwdefaults__ = None


def _scaler(observer, guard):
    scalers = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
    _wrap_scale(scalers, observer)
    _wrap_unscale(scalers, guard(observer.judge, "unscale"))
    judge, decided = guard(observer.judge_scaled, "scaler"), guard(observer.scaler_decided, "scaler")
    _wrap_decision(scalers, observer, judge, decided)


def _wrap_scale(scalers, observer):
    real = scalers.scale

    @functools.wraps(real)
    def scale(self, outputs):
        scaled = real(self, outputs)
        if isinstance(outputs, torch.Tensor) and self.is_enabled():
            observer.scaler = weakref.ref(self)
            observer.scaled = {id(scaled): outputs.detach().clone()}
        return scaled

    scalers.scale = scale


def _wrap_unscale(scalers, judge):
    real = scalers.unscale_

    @functools.wraps(real)
    def unscale_(self, optimizer):
        judge()
        return real(self, optimizer)

    scalers.unscale_ = unscale_


def _wrap_decision(scalers, observer, judge, decided):
    real = scalers._maybe_opt_step

    @functools.wraps(real)
    def _maybe_opt_step(self, optimizer, state, *args, **kwargs):
        scale, step = self.get_scale(), observer.step
        judge(scale)
        result = real(self, optimizer, state, *args, **kwargs)
        decided(self, scale, observer.step == step)
        return result

    scalers._maybe_opt_step = _maybe_opt_step
