"""Where the probe holds on to torch's GradScaler: the loss before scaling, unscaling, and the decision to step."""

from __future__ import annotations

import functools
from typing import Any, Iterator

import torch

from .guard import Guard
from .observer import Observer


def absorbed(optimizer: Any) -> bool:
    """A fused optimizer under a GradScaler runs and moves nothing: it was told of an Inf."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def install_scaler(observer: Observer, guard: Guard) -> None:
    """Patch GradScaler, and subclasses with methods of their own (FSDP's) when one is made."""
    base: Any = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
    known: set[type] = set()
    real = base.__init__

    def patch(scalers: type) -> None:
        for each in _unknown(scalers, base, known):
            _patch(each, observer, guard)

    watch, made = guard(patch, "scaler"), guard(lambda scaler: observer.keeper.made(scaler), "scaler")

    @functools.wraps(real)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        watch(type(self))
        made(self)

    patch(base)
    base.__init__ = __init__


def _unknown(scalers: type, base: type, known: set[type]) -> Iterator[type]:
    for each in scalers.__mro__:
        if issubclass(each, base) and each not in known:
            known.add(each)
            yield each


def _patch(scalers: Any, observer: Observer, guard: Guard) -> None:
    if "scale" in vars(scalers):
        _wrap_scale(scalers, guard(observer.scaled_by, "scale"))
    if "unscale_" in vars(scalers):
        _wrap_unscale(scalers, guard(observer.steps.judge, "unscale"))
    if "_maybe_opt_step" in vars(scalers):
        _wrap_decision(scalers, observer, guard)


def _wrap_scale(scalers: Any, note: Any) -> None:
    real = scalers.scale

    @functools.wraps(real)
    def scale(self: Any, outputs: Any) -> Any:
        if not isinstance(outputs, (torch.Tensor, list, tuple)):
            return real(self, outputs)  # an iterator can be read once
        scaled = real(self, outputs)
        note(self, outputs, scaled)
        return scaled

    scalers.scale = scale


def _wrap_unscale(scalers: Any, judge: Any) -> None:
    real = scalers.unscale_

    @functools.wraps(real)
    def unscale_(self: Any, optimizer: Any) -> Any:
        judge()
        return real(self, optimizer)

    scalers.unscale_ = unscale_


def _wrap_decision(scalers: Any, observer: Observer, guard: Guard) -> None:
    real = scalers._maybe_opt_step
    judge, skipped = guard(observer.steps.judge_scaled, "scaler"), guard(observer.steps.skipped, "scaler")
    will_skip = guard(_will_skip, "scaler")

    @functools.wraps(real)
    def _maybe_opt_step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        judge(self)
        skip = will_skip(optimizer_state)
        result = real(self, optimizer, optimizer_state, *args, **kwargs)
        if skip:
            skipped(optimizer)
        return result

    scalers._maybe_opt_step = _maybe_opt_step


def _will_skip(optimizer_state: Any) -> bool:
    return any(bool(found.item()) for found in optimizer_state["found_inf_per_device"].values())
