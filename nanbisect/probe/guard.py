"""Wraps the probe's own work: timed, without gradients, and never able to break the training."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable

import torch

from .observer import Observer

CUDA: Any = torch.cuda
ERRORS = 20  # errors written; one a gradient would fill the disk
compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def capturing() -> bool:
    """Whether a CUDA graph is being captured: a read of ours would break it."""
    return bool(CUDA.is_initialized() and CUDA.is_current_stream_capturing())


class Guard:
    """Makes guarded functions for one observer."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.errors = 0

    def __call__(self, work: Callable[..., Any], where: str) -> Callable[..., Any]:
        """`work`, with its errors written to the journal; None where it failed or must not run."""

        @functools.wraps(work)
        def guarded(*args: Any) -> Any:
            if compiling() or capturing():
                return None
            with self.observer.clock, torch.no_grad():
                try:
                    return work(*args)
                except Exception as error:  # noqa: BLE001 - the training must go on
                    self.failed(where, error)
            return None

        return guarded

    def failed(self, where: str, error: Exception) -> None:
        """Write an error down, if that is possible at all."""
        self.errors += 1
        if self.errors > ERRORS:
            return
        with contextlib.suppress(Exception):  # no space, no folder: nowhere left to say it
            self.observer.journal.write("probe_error", where=where, error=repr(error))
