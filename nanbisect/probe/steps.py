"""The step under way, judged before anything can smear it, and written down.

Ranges of losses and gradients are kept (on the device) and read at the first of: clipping, unscaling,
the optimizer, the next training forward without gradients, exit. What arrives after that is read at
the next of them: nothing is judged twice and nothing is skipped. Buffers, parameters and optimizer
state are looked at after the step (`contents`). Scripts with several optimizers step them one after
another: the first ends the step, and evidence on parameters of the others is carried over to their turn.
"""

from __future__ import annotations

import math
import time
import weakref
from typing import Any, Mapping, Sequence

import torch

from . import findings, numbers
from .account import account
from .batches import Batches, Forward
from .contents import Contents
from .events import Events, Place
from .journal import shared
from .ledger import Ledger
from .names import Names
from .ownership import others, without_gradient
from .phase import inside_backward
from .stopping import Count
from .window import Bad, Clock, LossValue, Surfaced, Window

UNPAIRED = 64  # forwards that wait for a backward


class Steps:
    """Judges losses, gradients and norms, step by step."""

    def __init__(self, journal: Ledger, names: Names, clock: Clock, batches: Batches) -> None:
        self.journal = journal
        self.batches = batches
        self.names = names
        self.clock = clock
        self.frees_gradients = False
        self.reset()

    def reset(self) -> None:
        """Begin at step 1 with nothing seen (a forked child's training is its own)."""
        self.window = Window(1)
        self.told = Events(self.journal)
        self.contents = Contents(self.names, self.told)
        self.count = Count()
        self.unlogged: str | None = None  # a non-finite loss that no log has told of yet
        self.scaler: weakref.ref[Any] | None = None
        self.began: float | None = None  # the first backward

    @property
    def events(self) -> int:
        """Non-finite events so far."""
        return self.told.count

    def seconds(self) -> float:
        """Since the first backward began."""
        return 0.0 if self.began is None else time.perf_counter() - self.began

    # judging -----------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """An outermost backward starts. Carried evidence stays only if it is still in the gradients."""
        window = self.window
        window.micro += 1
        self.began = time.perf_counter() if self.began is None else self.began
        for forward in window.forwards:
            forward.micro = window.micro if forward.micro is None else forward.micro
        if window.carried:
            window.carried = [bad for bad in window.carried if findings.still(bad)]
        if window.deferred is not None and window.micro == 0:
            left = [bad for bad in window.deferred.bad if findings.still(bad)]
            window.deferred = window.deferred._replace(bad=left) if left else None

    def judge(self) -> None:
        """Read the losses and gradients that arrived since the last reading, before anything can change them."""
        if inside_backward():  # the ranges were taken as the gradients arrived: they are read when it is over
            return
        window = self.window
        flags, losses, fine = window.take()
        if not flags and not losses and not fine:
            return
        self._pair()
        unscaled = [loss.handed if loss.unscaled is None else loss.unscaled for loss in losses]
        values = numbers.read([*(flag.ends for flag in flags), *(loss.handed for loss in losses), *unscaled])
        handed, rest = values[len(flags) : len(flags) + len(losses)], values[len(flags) + len(losses) :]
        new = [findings.loss_value(loss, *pair) for loss, pair in zip(losses, zip(handed, rest))]
        window.loss_values += new
        self.unlogged = next((loss.kind for loss in new if loss.kind is not None), self.unlogged)
        window.gradients += fine + sum(flag.use is None for flag in flags)
        fresh = findings.bad_gradients(flags, values, window.bad, self.names)
        window.bad += fresh
        if window.step == 1:
            window.norms = numbers.norms(self.names.gradients())
        self._surface(new, fresh)

    def forward(self, forward: Forward) -> None:
        """A training forward of a root starts; its batch is looked up when the flags are read."""
        window = self.window
        if len(window.forwards) < UNPAIRED:
            window.forwards.append(forward)
        elif not window.crowded:  # a script that never calls backward, or calls a part of its model very often
            window.crowded = True
            self._pair()

    def _pair(self) -> None:
        forwards, self.window.forwards = self.window.forwards, []
        if not forwards:
            return
        lines, lost = self.batches.lines(forwards, self.window.step)
        for fields in lines:
            self.journal.write("batch", **fields)
        if lost:
            text, values = findings.without_backward(lost)
            self.repair("forward_without_backward", text, values=values)

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
        place = Place(found.phase, found.value, found.micro)
        self.told.nonfinite(self.window, place, entries, max(len(self.window.leaves), len(entries)))

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
        self.repair("scaler_skip", text, [item.entry["name"] for item in bad])
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
            window.after_clip = findings.census(self.names)

    def measured(self, norm: Any) -> None:
        """A loop without clipping took the norm itself."""
        if self.window.norm is None:
            self.window.norm = norm

    # optimizer ---------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to move: judge now, and see which of its bad gradients were repaired."""
        first = self.contents.met(optimizer)
        self.window.stepping = True
        if inside_backward():
            return
        self.judge()
        if first and self.window.seen:
            lost = without_gradient(optimizer, self.names, self.window)
            if lost:
                text = "%d parameters that require a gradient had none at the first step" % len(lost)
                self.repair("no_gradient", text, lost)
        for code, text, names in findings.repaired(self.window.all_bad(), optimizer):
            self.repair(code, text, names)

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
            self.repair("dropped_step", text)
        norm = findings.host_norm(window.norm)
        self._check_norm(norm, how)
        self.contents.judge_buffers(window)
        if how == "step":
            self.contents.judge_moved(window, optimizer)
        elif how == "exit":
            self.contents.judge_left(window)
            self._pair()
        if window.seen:
            self.journal.write("step", **account(window, how, norm, self.clock))
            self.count.ended(how, window.micro + 1)
        self.window = Window(window.step + window.seen, others(window.all_bad(), optimizer), waiting)
        self.window.forwards = window.forwards  # of a step that has no backward yet

    def _check_norm(self, norm: float | None, how: str) -> None:
        window = self.window
        if norm is None or math.isfinite(norm) or how == "scaler_skip":
            return
        if math.isinf(norm) and window.clip is not None:
            text = "the gradient norm was Inf, so clipping set every finite gradient to 0"
            self.repair("zero_after_inf", text)
        if not (window.bad or window.carried or window.surfaced):
            value = "nan" if math.isnan(norm) else "+inf"
            phase = "reduce" if shared() and findings.came_from_others(norm, self.names) else "clip"
            place = Place(phase, value, window.micro_batch, window.number)
            self.told.nonfinite(window, place, [], len(window.leaves))

    def repair(
        self, code: str, text: str, tensors: Sequence[str] = (), *, values: Mapping[str, Any] | None = None
    ) -> None:
        """Something was repaired without a word; `values`: numbers that show it."""
        self.told.repair(self.window, code, text, tensors, values=values)
