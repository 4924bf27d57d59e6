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
from .batches import Batches, Forward, Lost
from .contents import Contents
from .events import Events, Place
from .graph import Walk
from .journal import rank, shared
from .keeping import Keeper
from .ledger import Ledger
from .names import Names
from .ownership import others, without_gradient
from .phase import inside_backward
from .stopping import Count
from .window import Bad, Clock, LossValue, Surfaced, Window

UNPAIRED = 64  # forwards that wait for a backward: the first half and the latest, of very many
CROWDED = 96  # of them, and the middle is dropped
PAIRED_AT = 256  # forwards looked up at once, whatever the accumulation
ANOMALY = " returned nan values in its "  # torch.autograd.detect_anomaly


class Steps:
    """Judges losses, gradients and norms, step by step."""

    def __init__(self, journal: Ledger, names: Names, clock: Clock, batches: Batches, keeper: Keeper) -> None:
        self.journal = journal
        self.batches = batches
        self.names = names
        self.clock = clock
        self.frees_gradients = False
        self.keeper = keeper
        self.trace: Any = None  # of one step, where it is wanted
        self.reset()

    def reset(self) -> None:
        """Begin at step 1 with nothing seen (a forked child's training is its own)."""
        self.window = Window(1)
        self.told = Events(self.journal)
        self.contents = Contents(self.names, self.told)
        self.count = Count()
        self.unlogged: str | None = None  # a non-finite loss that no log has told of yet
        self.filtering = False  # transformers' Trainer keeps such losses out of its log
        self.zero_loss = 0  # step of a loss of exactly 0 beside a non-finite norm
        self.ended = False  # the process ends: no backward will come
        self.unfinished = False  # it ended after a forward whose loss is not known
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
        if window.carried:
            window.carried = [bad for bad in window.carried if findings.still(bad)]
        if window.deferred is not None and window.micro == 0:
            left = [bad for bad in window.deferred.bad if findings.still(bad)]
            window.deferred = window.deferred._replace(bad=left) if left else None

    def claim(self, walk: Walk) -> None:
        """The forwards that this backward goes through are of its micro-batch; those that it passes by wait on."""
        waiting = [forward for forward in self.window.forwards if forward.micro is None]
        results = walk.results() if len(waiting) > 1 else set()
        used = [forward for forward in waiting if not forward.result.isdisjoint(results)]
        for forward in used or waiting:
            forward.micro, forward.used, forward.passed = self.window.micro, bool(used), None
        for forward in waiting:
            if forward.micro is None and forward.passed is None:
                forward.passed = self.window.micro
        if len(self.window.forwards) >= PAIRED_AT:
            self._pair(passed=False)

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
        """A training forward of a root starts; its batch is looked up when the flags are read.

        Of very many before one backward (a recurrent cell, a script that evaluates in training mode) the
        first and the latest are kept: one of them has the batch.
        """
        waiting = [each for each in self.window.forwards if each.micro is None]
        if len(waiting) >= CROWDED:
            self._thin(waiting)
        self.window.forwards.append(forward)

    def _thin(self, waiting: list[Forward]) -> None:
        """Drop those in the middle; a script whose losses are non-finite skips them, and may never call backward."""
        if findings.any_bad_loss(waiting):
            self._pair(every=True)
        else:
            dropped = waiting[UNPAIRED // 2 : -(UNPAIRED // 2)]
            self.window.forwards = [each for each in self.window.forwards if each not in dropped]

    def _pair(self, *, every: bool = False, passed: bool = True) -> None:
        """Look up the batches of forwards; those that may still get a backward wait on, unless `every` is set.

        `passed`: one that a backward has passed by gets none any more, since the step is about to be judged.
        """
        waiting = [each for each in self.window.forwards if each.micro is None]
        kept = [] if every else [each for each in waiting if each.passed is None or not passed]
        forwards = [each for each in self.window.forwards if each not in kept]
        self.window.forwards = kept
        if not forwards:
            return
        lines, lost = self.batches.lines(forwards, self.window.step, ended=self.ended)
        for fields in lines:
            self.journal.write("batch", rank=rank(), **fields)
        kinds = findings.lost_losses(lost)
        skipped = [(each, kind) for each, kind in zip(lost, kinds) if each.told or kind is not None]
        if skipped:
            text, values = findings.without_backward([kind for _, kind in skipped])
            self.repair("forward_without_backward", text, values=values, step=self.window.step)
        for each, kind in skipped:
            if kind is not None:
                self._skipped(each, kind)
        self.unfinished = self.ended and bool(lost) and lost[-1].forward.micro is None and kinds[-1] is None

    def _skipped(self, lost: Lost, kind: str) -> None:
        """The script had a non-finite loss, saw it and went on: no backward would ever show it."""
        forward = lost.forward
        micro = next((each for each in (forward.micro, forward.passed) if each is not None), self.window.micro + 1)
        self.journal.write("batch", rank=rank(), **{**lost.line, "micro_batch": micro, "backward": False})
        place = Place("loss", kind, micro, backward=False)
        self.told.nonfinite(self.window, place, [], len(self.window.leaves))

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
        self.keeper.event(self.window.step, found.micro)

    def backward_raised(self, text: str) -> None:
        """No gradient may show it: anomaly mode raises before the NaN reaches a parameter."""
        self.judge()
        self.repair("backward_raised", text)
        if ANOMALY in text and not self.window.surfaced and not self._scaling():
            self.window.surfaced = True
            place = Place("backward", "nan", self.window.micro_batch)
            self.told.nonfinite(self.window, place, [], len(self.window.leaves))

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
        if self.keeper.on:
            self.keeper.look(window.step, window.micro_batch, norm)
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
        if self.keeper.on:
            self.keeper.stepping(optimizer, first=first)
        if inside_backward():
            return
        self.judge()
        if self.keeper.on:
            self.keeper.look(self.window.step, self.window.micro_batch, self.window.norm)
        if first and self.window.seen:
            lost = without_gradient(optimizer, self.names, self.window)
            if lost:
                self.repair("no_gradient", findings.without_gradients(lost), lost)
        for code, text, names in findings.repaired(self.window.all_bad(), optimizer):
            self.repair(code, text, names)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has moved. In a hook during backward the step ends when backward does."""
        self.keeper.moved()
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
        self._check_zero_loss(norm)
        self._check_norm(norm, how)
        self.contents.judge_buffers(window)
        if how == "step":
            self.contents.judge_moved(window, optimizer)
        elif how == "exit":
            self.contents.judge_left(window)
            self._pair(every=True)
            self._tell_filtered()
        if window.seen:
            self.journal.write("step", **account(window, how, norm, self.clock))
            self.count.ended(how, window.micro + 1)
        if self.keeper.on and window.seen:
            self.keeper.next(window.step, self.events)
        self.window = Window(window.step + window.seen, others(window.all_bad(), optimizer), waiting)
        self.window.forwards = window.forwards  # of a step that has no backward yet
        if self.trace is not None:
            self.trace.ended(window, how, time.perf_counter() - window.began if window.seen else None)

    def _tell_filtered(self) -> None:
        """A Trainer that was ended before its next log line would have shown a finite loss there."""
        if self.filtering and self.unlogged is not None:
            text = "the Trainer's NaN filter (logging_nan_inf_filter) keeps %s, handed to backward, out of its log"
            self.repair("loss_filtered", text % self.unlogged, values={"raw": self.unlogged})

    def _check_zero_loss(self, norm: float | None) -> None:
        """A loss of exactly 0 looks like success; a NaN replaced by 0 after the fact looks so, too."""
        losses = self.window.loss_values
        bad = self.window.bad or (norm is not None and not math.isfinite(norm))
        if losses and bad and all(loss.handed == 0.0 for loss in losses):
            self.zero_loss = self.window.step
            what = "gradients were non-finite" if norm is None else "the gradient norm was %g" % norm
            text = "the loss handed to backward was 0.0, and %s" % what
            self.repair("zero_loss_with_bad_norm", text, values={"loss": 0.0, "norm": norm})

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
        self, code: str, text: str, tensors: Sequence[str] = (), *,
        values: Mapping[str, Any] | None = None, step: int | None = None,
    ) -> None:  # fmt: skip
        """Something was repaired without a word; `values`: numbers that show it."""
        self.told.repair(self.window, code, text, tensors, values=values, step=step)
