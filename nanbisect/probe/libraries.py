"""Where the probe holds on to what is imported after torch: transformers' Trainer, FSDP's own clipping."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Mapping

from .guard import Guard
from .imports import AfterImport
from .observer import Observer

FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"


def install_libraries(observer: Observer, guard: Guard, wrap_clip: Callable[[str, Any], Any]) -> None:
    """Wait for these modules. `wrap_clip`: what is done to torch's own clipping."""

    def trainer(module: Any) -> None:
        _wrap_log(module.Trainer, guard(functools.partial(_logged, observer), "Trainer.log"))
        _wrap_step(module.Trainer, guard(functools.partial(_trained, observer), "Trainer.training_step"))

    def fsdp(module: Any) -> None:
        sharded = module.FullyShardedDataParallel
        sharded.clip_grad_norm_ = wrap_clip("clip_grad_norm_", sharded.clip_grad_norm_)

    actions = {"transformers.trainer": guard(trainer, "Trainer"), FSDP: guard(fsdp, "FSDP")}
    AfterImport(actions).arm()


def _wrap_log(trainer: Any, logged: Any) -> None:
    real = trainer.log

    @functools.wraps(real)
    def log(self: Any, logs: Any, *args: Any, **kwargs: Any) -> Any:
        logged(getattr(getattr(self, "args", None), "logging_nan_inf_filter", None), logs)
        return real(self, logs, *args, **kwargs)

    trainer.log = log


def _wrap_step(trainer: Any, trained: Any) -> None:
    real = getattr(trainer, "training_step", None)
    if real is None:
        return

    @functools.wraps(real)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = real(self, *args, **kwargs)
        trained(getattr(getattr(self, "args", None), "logging_nan_inf_filter", None))
        return loss

    trainer.training_step = training_step


def _trained(observer: Observer, filtering: Any) -> None:
    observer.steps.filtering = bool(filtering)


def _logged(observer: Observer, filtering: Any, logs: Any) -> None:
    """Compare what the Trainer says with what was handed to backward since it spoke last."""
    if not isinstance(logs, Mapping) or "loss" not in logs:
        return
    loss, norm = _float(logs["loss"]), _float(logs.get("grad_norm"))
    if loss is None or not math.isfinite(loss):
        observer.steps.unlogged = None
        return
    raw, observer.steps.unlogged = observer.steps.unlogged, None
    if raw is not None:
        how = "its NaN filter (logging_nan_inf_filter) is on" if filtering else "its NaN filter is off"
        text = "the Trainer logged loss %g where %s was handed to backward: %s" % (loss, raw, how)
        observer.steps.repair("loss_filtered", text, values={"raw": raw, "logged": loss})
    elif loss == 0.0 and norm is not None and not math.isfinite(norm) and not observer.steps.zero_loss:
        text = "the Trainer logged loss 0.0 with gradient norm %g" % norm
        observer.steps.repair("zero_loss_with_bad_norm", text, values={"logged": loss, "norm": norm})
    observer.steps.zero_loss = 0


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
