"""The loop's side of the probe: it was loaded by path, so it is found by its private name or is not there.

Without the probe everything here does nothing, and the training computes the same.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def _call(name: str, *arguments: Any) -> Any:
    probe = sys.modules.get("_nanbisect_probe")
    return getattr(probe, name)(*arguments) if probe is not None else None


def model(module: Any) -> None:
    """The whole model, before the first step: its names, and what was non-finite as it was loaded."""
    _call("model", module)


def norm(value: Any) -> None:
    """A gradient norm that the loop measured itself."""
    _call("norm", value)


def backward_only() -> None:
    """Gradients are freed as they arrive."""
    _call("backward_only")


def end_of_step() -> None:
    """There is no optimizer that would end the step."""
    _call("end_of_step")


def found() -> bool:
    """Whether a non-finite value has surfaced."""
    return bool(_call("found"))


def finish() -> None:
    """This training has ended, and the process goes on: what is left is written."""
    _call("finish")


def again() -> None:
    """Another training begins: the probe has seen nothing, and writes to the folder of now."""
    folder = os.environ.get("NANBISECT_PROBE")
    if folder:
        _call("again", folder)
