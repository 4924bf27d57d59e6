"""Where the probe holds on to torch's data loaders: the indices asked for, the batches served."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import dataloader, get_worker_info

from .guard import Guard
from .observer import Observer


def install_loaders(observer: Observer, guard: Guard) -> None:
    """Patch the base of all loader iterators; neither subclass overrides `_next_index` or `__next__`."""
    base: Any = dataloader._BaseDataLoaderIter
    real_index, real_next, real_reset = base._next_index, base.__next__, base._reset
    asked = guard(lambda *seen: observer.batches.asked(*seen), "data loader")
    served = guard(lambda *seen: observer.batches.served(*seen), "data loader")
    began = guard(lambda *seen: observer.batches.began(*seen), "data loader")
    kept = guard(lambda iterator, batch: (observer.keeper.serve(iterator, batch),), "data loader")

    @functools.wraps(real_index)
    def _next_index(self: Any) -> Any:
        indices = real_index(self)
        asked(self, indices)
        return indices

    @functools.wraps(real_next)
    def __next__(self: Any) -> Any:
        batch = real_next(self)
        if observer.keeper.on:
            batch = _given(self, batch, kept)
        served(self, batch)
        return batch

    @functools.wraps(real_reset)
    def _reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        began(self)
        return real_reset(self, *args, **kwargs)

    base._next_index, base.__next__, base._reset = _next_index, __next__, _reset


def _given(iterator: Any, batch: Any, kept: Any) -> Any:
    """What the script gets: the loader's batch, or that of a capsule; the former if anything went wrong."""
    found = kept(iterator, batch) if get_worker_info() is None else None
    return batch if found is None else found[0]
