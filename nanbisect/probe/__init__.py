"""The observer inside a training process. Standard library and torch only, Python 3.9+, torch 2.1+.

Loaded by path under a private name from `site/sitecustomize.py`, right after torch was executed.
Every backward call is entered through a walk of its graph; one hook a leaf takes the range of its
gradient as it is accumulated; the ranges are read once a step, before anything can smear them. It
never changes what the training computes, and it proves in every run that it was awake.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from .observer import Observer

OLDEST = (2, 1)  # torch

_observer: Observer | None = None
_end: Callable[[str], Any] | None = None
_learn: Callable[[Any], Any] | None = None


def install(folder: str) -> None:
    """Patch torch in this process; events go to files in `folder`. Called once, by sitecustomize."""
    global _observer, _end, _learn
    import torch

    from .ledger import Ledger
    from .limits import limits

    wanted, version = limits(os.environ), str(getattr(torch, "__version__", "?"))
    versions = {"schema": 1, "torch": version, "python": platform.python_version()}
    journal = Ledger(folder, versions, every_line=wanted.every_line)
    journal.armed()
    if _too_old(version):
        journal.write("probe_error", where="install", error="torch %s is too old, it needs 2.1" % version)
        sys.stderr.write("nanbisect: torch %s is too old for the probe, which needs 2.1\n" % version)
        return
    try:
        from . import patches
        from .observer import Observer
        from .phase import make_deterministic

        observer = Observer(journal, wanted)
        guard = patches.install(observer)
        make_deterministic(wanted.deterministic)
    except Exception as error:  # half of it may be at work: say so, lest the run count as judged
        journal.write("probe_error", where="install", error=repr(error))
        raise
    _observer, _end = observer, guard(observer.steps.end, "end of step")
    _learn = guard(observer.learn, "learning the model")


def moved(folder: str) -> None:
    """This process is a fork of one that only imported: from here on events go to `folder`, as its own."""
    if _observer is not None:
        from .limits import limits
        from .phase import make_deterministic

        _observer.follow(folder, limits(os.environ))
        make_deterministic(_observer.stopper.limits.deterministic)


def again(folder: str) -> None:
    """This process begins another training: nothing was seen so far, and events go to `folder`."""
    if _observer is not None:
        from .limits import limits

        _observer.forget()
        _observer.follow(folder, limits(os.environ))


def finish() -> None:
    """The training is over, and its process is not: write the last line."""
    if _observer is not None:
        _observer.stopper.finish()


def _too_old(version: str) -> bool:
    numbers = re.findall(r"\d+", version)[:2]
    return len(numbers) == 2 and tuple(map(int, numbers)) < OLDEST


def found() -> bool:
    """Whether a non-finite value has surfaced so far; a training loop may stop then."""
    return _observer is not None and _observer.found


def end_of_step() -> None:
    """Called by a loop that has no optimizer: the gradients of this step are complete (or freed)."""
    if _end is not None:
        _end("backward_only")


def backward_only() -> None:
    """Called by a loop that frees gradients as they arrive: a missing gradient is no repair there."""
    if _observer is not None:
        _observer.steps.frees_gradients = True


def model(module: Any) -> None:
    """Called by a loop before its first step: look at the whole model as it was loaded, and take its names."""
    if _learn is not None:
        _learn(module)


def norm(value: Any) -> None:
    """Called by a loop that does not clip: the gradient norm that it measured itself."""
    if _observer is not None:
        _observer.steps.measured(value)
