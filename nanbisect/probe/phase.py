"""What torch is doing at this moment, on this thread; and one switch of what it does."""

from __future__ import annotations

from typing import Any, Callable

import torch

CUDA: Any = torch.cuda
compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def capturing() -> bool:
    """Whether a CUDA graph is being captured: a read of ours would break it."""
    return bool(CUDA.is_initialized() and CUDA.is_current_stream_capturing())


def graph_task() -> int:
    """A number for the backward call at work here, each nested one its own; -1 outside."""
    return int(torch._C._current_graph_task_id())


def inside_backward() -> bool:
    """Whether autograd is at work: hooks of the script may clip or step there, and modules run again."""
    return bool(torch._C._current_graph_task_id() != -1)


def make_deterministic(level: str) -> None:
    """Deterministic kernels, where `level` says so; fresh memory filled with NaN only for `kernels+fill`. These
    change what is computed: only an attempt that looks for memory that nothing wrote asks for them."""
    if level:
        torch.use_deterministic_algorithms(True, warn_only=True)
        switches: Any = getattr(torch.utils, "deterministic", None)
        if switches is not None:  # torch 2.2
            switches.fill_uninitialized_memory = level == "kernels+fill"
