"""Wraps the probe's own work: timed, without gradients, and never able to break the training."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable

import torch

from .observer import Observer
from .phase import capturing, compiling

AS_IT_IS = contextlib.nullcontext()  # in backward gradients are off already: `no_grad` costs as much as the rest
ERRORS = 20  # errors written; one a gradient would fill the disk


class Guard:
    """Makes guarded functions for one observer."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def __call__(self, work: Callable[..., Any], where: str) -> Callable[..., Any]:
        """`work`, with its errors written to the journal; None where it failed or must not run."""

        @functools.wraps(work)
        def guarded(*args: Any) -> Any:
            if compiling() or capturing():
                return None
            with self.observer.clock, torch.no_grad() if torch.is_grad_enabled() else AS_IT_IS:
                try:
                    return work(*args)
                except Exception as error:  # noqa: BLE001 - the training must go on
                    self.failed(where, error)
            return None

        return guarded

    def failed(self, where: str, error: Exception) -> None:
        """Write an error down, if that is possible at all."""
        journal = self.observer.journal
        journal.errors += 1
        if journal.errors > ERRORS:
            return
        with contextlib.suppress(Exception):  # no space, no folder: nowhere left to say it
            journal.write("probe_error", where=where, error=repr(error))
