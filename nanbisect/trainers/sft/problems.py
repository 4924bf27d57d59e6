"""Why a training process may end early, as exceptions; `__main__` turns each into an `end` line."""

from __future__ import annotations

import errno
from collections.abc import Mapping


class BadInput(Exception):
    """The model, data or recipe can't be used as given: what, where, what to try."""


class Unsupported(Exception):
    """This machine or model can't run these levels; `levels` maps setting to level.

    Without `levels` only this cell can't run: what failed may depend on its data.
    """

    def __init__(self, reason: str, levels: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.levels = dict(levels or {})


OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Cannot allocate memory",
)


def out_of_memory(error: BaseException) -> bool:
    """CUDA's and the host allocator's errors, told by class and, where several share one, by torch's words."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in OUT_OF_MEMORY)


def first_line(error: BaseException) -> str:
    """The first line of its message that says something, or its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
