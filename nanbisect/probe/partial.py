"""When what the probe sees is not all: libraries that take gradients apart before anybody can look at them."""

from __future__ import annotations

from typing import Any

PARTITIONED = 2  # the first stage of ZeRO that partitions gradients


def reason(module: Any) -> str | None:
    """Why training through this module can't be seen whole, or None."""
    if not any(kind.__module__.split(".")[0] == "deepspeed" for kind in type(module).__mro__):
        return None
    stage = getattr(module, "zero_optimization_stage", None)
    number = int(stage()) if callable(stage) else 0
    if number < PARTITIONED:
        return None
    return (
        "DeepSpeed ZeRO stage %d partitions gradients: this rank sees a part of each, for a part of the time" % number
    )
