"""The line that a step leaves, whatever came of it."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch

from .window import Clock, Window

FIRST_BAD = 16  # tensors listed in an event


def account(window: Window, how: str, norm: float | None, clock: Clock) -> dict[str, Any]:
    """The fields of a `step` event."""
    losses = [
        {"micro_batch": loss.micro, "handed": loss.handed, "unscaled": loss.unscaled} for loss in window.loss_values
    ]
    return {
        "step": window.step, "taken": how == "step", "ended": how, "losses": losses,
        "backwards": window.micro + 1, "nested": window.nested, "recomputed": window.recomputed,
        "kernels": window.kernels, "casts": window.casts, "gradients": window.gradients,
        "bad": [bad.entry for bad in window.bad[:FIRST_BAD]],
        "norm": norm, "clip": window.clip, "after_clip": window.after_clip,
        "gradient_norms": window.norms, "scale": window.scale, "memory": memory(),
        "seconds": time.perf_counter() - window.began, "probe_seconds": clock.take(),
    }  # fmt: skip


def memory() -> dict[str, int | None]:
    """Peak bytes of this process on the host and on the device (None without CUDA)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cuda: Any = torch.cuda
    device = cuda.max_memory_allocated() if cuda.is_initialized() else None
    return {"host": peak, "device": device}
