"""The observer inside a training process. Standard library and torch only, Python 3.9+, torch 2.1+.

Loaded by path under a private name from `site/sitecustomize.py`, right after torch was executed.
Every backward call is entered through a walk of its graph; one hook a leaf takes the range of its
gradient as it is accumulated; the ranges are read once a step, before anything can smear them. It
never changes what the training computes, and it proves in every run that it was awake.
"""

from __future__ import annotations

import platform

_observer = None


def install(folder):
    """Patch torch in this process; events go to files in `folder`. Called once, by sitecustomize."""
    global _observer
    import torch

    from . import patches
    from .journal import Journal
    from .observer import Observer

    journal = Journal(folder, {"schema": 1, "torch": str(torch.__version__), "python": platform.python_version()})
    journal.armed()
    _observer = Observer(journal)
    patches.install(_observer)


def found():
    """Whether a non-finite value has surfaced so far; a training loop may stop then."""
    return _observer is not None and _observer.found


def end_of_step():
    """Called by a loop that has no optimizer: the gradients of this step are complete (or freed)."""
    if _observer is not None:
        _observer.end("backward_only")


def backward_only():
    """Called by a loop that frees gradients as they arrive: a missing gradient is no repair there."""
    if _observer is not None:
        _observer.frees_gradients = True
