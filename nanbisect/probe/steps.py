"""The step under way, judged before anything can smear it, and written down.

Ranges of losses and gradients are kept on the device and read at the first of: clipping, unscaling,
the optimizer, the next training forward without gradients, exit. What arrives after that is read at
the next of them: nothing is judged twice and nothing is skipped. Buffers, parameters and optimizer
state are read after the step. Scripts with several optimizers step them one after another: the first
ends the step, and evidence on parameters of the others is carried over to their turn.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from . import numbers
from .account import FIRST_BAD, account
from .journal import Journal, rank
from .names import Names
from .ownership import others, owned, state_of
from .window import Bad, BufferFlag, Clock, Entry, Flag, Loss, LossValue, Surfaced, Window

EVENTS = 4  # non-finite events written; the first is the one that counts
STATE_ALWAYS = 64  # steps after each of which the optimizer's state is looked at, then every fifth
STATE_EVERY = 5


def inside_backward() -> bool:
    """Whether autograd is at work on this thread: hooks of the script may clip or step there."""
    return bool(torch._C._current_graph_task_id() != -1)


class Steps:
    """Judges losses, gradients, norms, parameters, buffers and optimizer state, step by step."""

    def __init__(self, journal: Journal, names: Names, clock: Clock) -> None:
        self.journal = journal
        self.names = names
        self.clock = clock
        self.frees_gradients = False
        self.reset()

    def reset(self) -> None:
        """Begin at step 1 with nothing seen (a forked child's training is its own)."""
        self.window = Window(1)
        self.events = 0
        self.scaler: weakref.ref[Any] | None = None
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.infinite: dict[str, str] = {}  # buffers that hold an Inf which is taken to be intended, and its kind

    # loading -----------------------------------------------------------------------------------

    def check_loaded(self, parameters: list[tuple[str, torch.Tensor]], buffers: list[tuple[str, torch.Tensor]]) -> None:
        """Values before the first step. An Inf in a buffer is usually an intended mask."""
        bad = numbers.bad_of(parameters)
        for entry in numbers.bad_of(buffers):
            if entry["value"] == "nan":
                bad.append(entry)
            else:
                self._note_infinite(entry["name"], entry["value"], "after loading")
        if bad:
            self._event("load", bad[0]["value"], bad, 0, len(parameters) + len(buffers))

    def _note_infinite(self, name: str, value: str, when: str) -> None:
        if name not in self.infinite:
            self.infinite[name] = value
            self._repair("infinite_buffer", "buffer %s holds %s %s" % (name, value, when), [name])

    # judging -----------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """An outermost backward starts. Carried evidence stays only if it is still in the gradients."""
        window = self.window
        window.micro += 1
        if window.carried:
            window.carried = [bad for bad in window.carried if _still(bad)]
        if window.deferred is not None and window.micro == 0:
            left = [bad for bad in window.deferred.bad if _still(bad)]
            window.deferred = window.deferred._replace(bad=left) if left else None

    def judge(self) -> None:
        """Read the losses and gradients that arrived since the last reading, before anything can change them."""
        if inside_backward():  # the ranges were taken as the gradients arrived: they are read when it is over
            return
        window = self.window
        flags, losses = window.take()
        if not flags and not losses:
            return
        unscaled = [loss.handed if loss.unscaled is None else loss.unscaled for loss in losses]
        values = numbers.read([flag.ends for flag in flags] + [loss.handed for loss in losses] + unscaled)
        handed, rest = values[len(flags) : len(flags) + len(losses)], values[len(flags) + len(losses) :]
        new = [_loss_value(loss, *pair) for loss, pair in zip(losses, zip(handed, rest))]
        window.loss_values += new
        window.gradients += sum(flag.use is None for flag in flags)
        fresh = self._bad_gradients(flags, values[: len(flags)])
        window.bad += fresh
        if window.step == 1:
            window.norms = numbers.norms(self.names.gradients())
        self._surface(new, fresh)

    def _bad_gradients(self, flags: list[Flag], values: list[numbers.Ends]) -> list[Bad]:
        """Distinct tensors with a non-finite gradient, in order of arrival, each at its first micro-batch."""
        known = {id(bad.handle) for bad in self.window.bad}
        uses: dict[tuple[int, int], list[str]] = {}
        fresh: list[Bad] = []
        for flag, (low, high) in zip(flags, values):
            value, tensor = numbers.kind(low, high), flag.handle()
            if value is None or tensor is None or id(flag.handle) in known:
                continue
            key = (flag.micro, id(flag.handle))
            if flag.use is not None:
                uses.setdefault(key, []).append(flag.use)
                continue
            known.add(id(flag.handle))
            grad = tensor.grad if len(fresh) < FIRST_BAD else None
            entry = numbers.entry(self.names.name(tensor), value, grad, micro=flag.micro, uses=uses.get(key, ()))
            fresh.append(Bad(flag.handle, entry))
        return fresh

    def _surface(self, losses: list[LossValue], fresh: list[Bad]) -> None:
        """The first non-finite value read: the loss of a micro-batch stands before its gradients."""
        window = self.window
        loss = next((loss for loss in losses if loss.kind is not None), None)
        first = fresh[0].entry if fresh else None
        certain = False
        if loss is not None and loss.kind is not None and (first is None or loss.micro <= first["micro_batch"]):
            found = Surfaced("loss", loss.kind, loss.micro, fresh)
            certain = loss.unscaled is not None
        elif first is not None:
            found = Surfaced("backward", first["value"], first["micro_batch"], fresh)
        else:
            return
        if self._scaling() and not certain:
            waiting = window.deferred
            window.deferred = found if waiting is None else waiting._replace(bad=waiting.bad + fresh)
        elif not window.surfaced:
            self._write(found)

    def _write(self, found: Surfaced) -> None:
        self.window.surfaced = True
        entries = [bad.entry for bad in found.bad]
        self._event(found.phase, found.value, entries, found.micro, max(len(self.window.leaves), len(entries)))

    # GradScaler --------------------------------------------------------------------------------

    def _scaling(self) -> bool:
        scaler = self.scaler() if self.scaler is not None else None
        return scaler is not None and bool(scaler.is_enabled())

    def judge_scaled(self, scaler: Any) -> None:
        """A GradScaler is about to decide, at its scale of now."""
        self.judge()
        self.window.scale = scaler.get_scale()

    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler skipped this optimizer's step."""
        bad = self.window.all_bad()
        text = "the GradScaler skipped a step at scale %g" % (self._scale() or 0.0)
        self._repair("scaler_skip", text, [item.entry["name"] for item in bad])
        self.end("scaler_skip", optimizer)

    def _scale(self) -> float | None:
        scaler = self.scaler() if self.scaler is not None else None
        if self.window.scale is None and scaler is not None:
            return float(scaler.get_scale())
        return self.window.scale

    def _settle(self, how: str, optimizer: torch.optim.Optimizer | None) -> Surfaced | None:
        """Write a deferred event if the scaler did not absorb it; return what waits for another optimizer.

        At scale 1 or below there is nothing left to absorb. An optimizer that moves had finite
        gradients, says the scaler: what arrived in its own parameters was then not absorbed but repaired.
        """
        waiting, self.window.deferred = self.window.deferred, None
        if waiting is None:
            return None
        rest = others(waiting.bad, optimizer)
        mine = len(rest) < len(waiting.bad) or not waiting.bad
        scale = self._scale()
        if (scale is not None and scale <= 1.0) or (how == "step" and mine):
            self._write(waiting)
            return None
        return waiting._replace(bad=rest) if rest else None

    # clipping ----------------------------------------------------------------------------------

    def clipped(self, call: str, max_norm: float | None, norm: Any, raised: bool) -> None:
        """Clipping has returned (or raised): keep its norm, and what a check now would say."""
        if inside_backward():
            return
        window = self.window
        window.clip = {"call": call, "max_norm": max_norm, "raised": raised}
        window.norm = norm if norm is not None else window.norm
        if window.bad:
            window.after_clip = self._census()

    def measured(self, norm: Any) -> None:
        """A loop without clipping took the norm itself."""
        if self.window.norm is None:
            self.window.norm = norm

    def _census(self) -> dict[str, Any]:
        """What a script sees that looks through `named_parameters()` for the first bad gradient."""
        pairs = self.names.gradients()
        bad = numbers.bad_of(pairs, counted=1)
        first: Entry = bad[0] if bad else {"name": None, "nan": 0, "posinf": 0, "neginf": 0, "numel": 0}
        count = first["nan"] + first["posinf"] + first["neginf"]
        whole = {"parameters_bad": len(bad), "parameters": len(pairs)}
        return {"first": first["name"], "bad": count, "numel": first["numel"], **whole}

    # optimizer ---------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to move: judge now, and see which of its bad gradients were repaired."""
        self.optimizers.add(optimizer)
        self.window.stepping = True
        if inside_backward():
            return
        self.judge()
        moved = {id(parameter) for parameter in owned(optimizer)}
        mine = [(bad.entry["name"], bad.handle()) for bad in self.window.all_bad() if id(bad.handle()) in moved]
        live = [(name, tensor.grad) for name, tensor in mine if tensor is not None]
        dropped = [name for name, grad in live if grad is None]
        if dropped:
            text = "%d non-finite gradients were set to None before the optimizer" % len(dropped)
            self._repair("gradients_set_to_none", text, dropped)
        kept = [(name, grad) for name, grad in live if grad is not None]
        repaired = [name for name, grad in kept if not numbers.bad_of([(name, grad)], counted=0)]
        if repaired:
            text = "%d gradients arrived non-finite and were finite again at the optimizer" % len(repaired)
            self._repair("gradients_repaired", text, repaired)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has moved. In a hook during backward the step ends when backward does."""
        if inside_backward():
            self.window.stepped_inside = True
        else:
            self.end("step", optimizer)

    def end(self, how: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The step is over: write it, look at parameters, buffers and state, start the next."""
        self.judge()
        window = self.window
        waiting = self._settle(how, optimizer)
        if how == "dropped":
            text = "step %d was dropped: gradients set to None, no optimizer step" % window.step
            self._repair("dropped_step", text, [])
        norm = self._norm()
        self._check_norm(norm, how)
        self._check_after(how == "step", optimizer)
        if window.seen:
            self.journal.write("step", **account(window, how, norm, self.clock))
        self.window = Window(window.step + window.seen, others(window.all_bad(), optimizer), waiting)

    def _number(self) -> int:
        """The step that the work belongs to: the one before, if no backward was seen since."""
        return self.window.step if self.window.seen else max(1, self.window.step - 1)

    def _norm(self) -> float | None:
        norm = self.window.norm
        if isinstance(norm, torch.Tensor) and hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        return None if norm is None else float(norm)

    def _check_norm(self, norm: float | None, how: str) -> None:
        window = self.window
        if norm is None or math.isfinite(norm) or how == "scaler_skip":
            return
        if math.isinf(norm) and window.clip is not None:
            text = "the gradient norm was Inf, so clipping set every finite gradient to 0"
            self._repair("zero_after_inf", text, [])
        if not (window.bad or window.carried or window.surfaced):
            value = "nan" if math.isnan(norm) else "+inf"
            self._event("clip", value, [], window.micro_batch, len(window.leaves), step=self._number())

    def look_at_buffers(self) -> None:
        """After a micro-batch's backward: the forward may have poisoned a buffer. Nothing is read yet."""
        for name, tensor in self.names.buffers_now():
            ends = numbers.ends(tensor)
            if ends is not None:
                handle = self.names.handles.of(tensor)
                self.window.buffers.append(BufferFlag(self.window.micro_batch, name, handle, ends))

    def _check_buffers(self) -> None:
        """A NaN is an event, and +Inf in what was finite; -Inf is how masks are written, wherever they are built."""
        flags, self.window.buffers = self.window.buffers, []
        bad: list[Entry] = []
        for flag, (low, high) in zip(flags, numbers.read([flag.ends for flag in flags])):
            value = numbers.kind(low, high)
            if value is None or flag.name in [entry["name"] for entry in bad]:
                continue
            if value == "-inf" or (value == "+inf" and flag.name in self.infinite):
                self._note_infinite(flag.name, value, "in training")
            else:
                bad.append(numbers.entry(flag.name, value, flag.handle(), micro=flag.micro))
        if bad:
            self._event("forward", bad[0]["value"], bad, bad[0]["micro_batch"], len(flags), step=self._number())

    def _check_after(self, moved: bool, optimizer: torch.optim.Optimizer | None) -> None:
        """Buffers always (a forward may poison them), parameters and state if the optimizer moved."""
        window = self.window
        self._check_buffers()
        if not moved:
            return
        pairs = self.names.live(self.names.parameters)
        if not window.seen:  # a second optimizer of the same step
            pairs = [(self.names.name(parameter), parameter) for parameter in owned(optimizer)]
        if self._number() <= STATE_ALWAYS or self._number() % STATE_EVERY == 0 or window.bad:
            pairs = pairs + state_of(self.optimizers, self.names)
        self._check("optimizer", pairs)

    def _check(self, phase: str, pairs: list[tuple[str, torch.Tensor]]) -> None:
        bad = numbers.bad_of(pairs)
        if bad:
            step, micro = self._number(), self.window.micro_batch
            for entry in bad:
                entry["micro_batch"] = micro
            self._event(phase, bad[0]["value"], bad, micro, len(pairs), step=step)

    # writing -----------------------------------------------------------------------------------

    def _event(self, phase: str, value: str, bad: list[Entry], micro: int, of: int, *, step: int | None = None) -> None:
        self.events += 1
        if self.events > EVENTS:
            return
        self.journal.write(
            "nonfinite",
            step=self.window.step if step is None else step, micro_batch=micro, rank=rank(), phase=phase,
            value=value, tensors=bad[:FIRST_BAD], bad=len(bad), of=of, scale=self.window.scale,
        )  # fmt: skip

    def _repair(self, code: str, text: str, tensors: list[str]) -> None:
        self.journal.write("repair", step=self._number(), code=code, text=text, tensors=tensors[:FIRST_BAD])


def _loss_value(loss: Loss, handed: numbers.Ends, value: numbers.Ends) -> LossValue:
    return LossValue(loss.micro, handed[0], None if loss.unscaled is None else value[0], numbers.kind(*value))


def _still(bad: Bad) -> bool:
    """Whether the gradient is there and still non-finite. Reads the host: for flagged gradients only."""
    tensor = bad.handle()
    grad = None if tensor is None else tensor.grad
    return grad is not None and bool(numbers.bad_of([("", grad)], counted=0))
