"""From settings to the objects of the loop: device, Accelerator, model, optimizer, attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from nanbisect.trainers.sft.problems import BadInput, Unsupported, first_line
from nanbisect.trainers.sft.recipes.load import Recipe, user_code
from nanbisect.trainers.sft.view import Settings, read_by

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MIXED = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}
REENTRANT = {"on": False, "reentrant": True}
KERNELS = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"foreach": False},
    "adamw_foreach": {"foreach": True},
    "adamw_fused": {"fused": True},
}


def device_of(wanted: str) -> torch.device:
    """cuda when there is one and nothing else was asked for, else cpu. Raises Unsupported."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise Unsupported("device cuda was asked for, and torch sees no CUDA device")
    return torch.device("cuda" if there and wanted != "cpu" else "cpu")


def accelerator_for(plan: SimpleNamespace, device: torch.device) -> Accelerator:
    """Accelerate with the wanted autocast; the loop accumulates by itself, so that it can try a step again.

    Accelerate trains in full precision, silently, when fp16 is asked for on a CPU. torch can do it, so
    autocast and a GradScaler are switched on there by hand. Without an optimizer nobody would lower the
    scale, and an overflow that a scaler hides would pass for one that it absorbs: so none there.
    """
    if plan.precision == "fp16" and plan.param_dtype == "fp16" and plan.optimizer != "none":
        raise Unsupported(
            "a GradScaler can't unscale fp16 gradients (use param_dtype fp32, or precision fp32 for pure fp16)",
            {"precision": "fp16", "param_dtype": "fp16"},
        )
    accelerator = Accelerator(mixed_precision=MIXED[plan.precision], cpu=device.type == "cpu")
    if plan.precision == "fp16" and device.type == "cpu":
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu")
    if plan.optimizer == "none":
        accelerator.scaler = None
    return accelerator


def autocast_dtype(device: str) -> str | None:
    """The dtype of the autocast that is open right now on this kind of device, or None."""
    cuda = device == "cuda"
    try:
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    except (TypeError, AttributeError):  # before torch 2.4 each device had functions of its own
        enabled = torch.is_autocast_enabled() if cuda else torch.is_autocast_cpu_enabled()
        dtype = torch.get_autocast_gpu_dtype() if cuda else torch.get_autocast_cpu_dtype()
    return str(dtype).removeprefix("torch.") if enabled else None


def determinism(level: str) -> None:
    """Deterministic kernels; and fresh memory filled with NaN or not. Two things, so two levels."""
    torch.use_deterministic_algorithms(level != "off", warn_only=True)
    switches: Any = torch.utils.deterministic
    switches.fill_uninitialized_memory = level == "kernels+fill"


def build_model(recipe: Recipe, settings: Settings, plan: SimpleNamespace, device: torch.device) -> torch.nn.Module:
    """The recipe's model on the device, in the wanted dtype, training, with checkpointing if it knows how.

    A recipe that reads `param_dtype` or `gradient_checkpointing` has seen to it: transformers loads a
    model in a dtype and keeps some buffers in fp32, which a cast of the whole module would round.
    """
    return fitted(loaded(recipe, settings, plan), read_by(settings), plan, device)


def loaded(recipe: Recipe, settings: Settings, plan: SimpleNamespace) -> torch.nn.Module:
    """What the recipe's model() returns. Raises BadInput unless it is a model to train."""
    with user_code(plan.recipe, "model"):
        model = recipe.model(settings)
    if not isinstance(model, torch.nn.Module):
        raise BadInput(
            f"the recipe's model() returned {type(model).__name__}, not a torch.nn.Module\ntry: return the model"
        )
    if not trainable(model):
        raise BadInput("the recipe's model has no parameter to train\ntry: requires_grad=True for at least one")
    return model


def fitted(
    model: torch.nn.Module, read: frozenset[str], plan: SimpleNamespace, device: torch.device
) -> torch.nn.Module:
    """A loaded model on the device, with what its recipe has not read of the settings."""
    level = plan.gradient_checkpointing
    if level != "off" and "gradient_checkpointing" not in read:
        enable_checkpointing(model, level)
    dtype = None if "param_dtype" in read else DTYPES[plan.param_dtype]
    return model.to(device=device, dtype=dtype).train()


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that want a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def enable_checkpointing(model: torch.nn.Module, level: str) -> None:
    """transformers' own switch. Raises Unsupported for a model that has none."""
    switch: Any = getattr(model, "gradient_checkpointing_enable", None)
    if switch is None:
        raise Unsupported(
            "the recipe neither reads settings.gradient_checkpointing "
            "nor returns a model with gradient_checkpointing_enable()",
            {"gradient_checkpointing": level},
        )
    try:
        switch(gradient_checkpointing_kwargs={"use_reentrant": REENTRANT[level]})
    except ValueError as error:
        raise Unsupported(first_line(error), {"gradient_checkpointing": level}) from error


def build_optimizer(plan: SimpleNamespace, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    """AdamW or one of its variants, SGD, or None for backward only."""
    name = plan.optimizer
    if name == "none":
        return None
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=plan.learning_rate, weight_decay=plan.weight_decay)
    common = {"lr": plan.learning_rate, "eps": plan.adam_eps, "weight_decay": plan.weight_decay}
    return torch.optim.AdamW(parameters, **common, **VARIANTS[name])


def attention_kernel(plan: SimpleNamespace) -> Callable[[], AbstractContextManager[None]]:
    """A context that allows one SDPA kernel; it must be open in backward too, where recompute runs."""
    name = plan.attention_kernel
    return nullcontext if name is None else lambda: forced_kernel(name)


@contextmanager
def forced_kernel(name: str) -> Iterator[None]:
    """Only this SDPA kernel. Raises Unsupported if torch knows none of that name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, KERNELS[name], None)
    if backend is None:
        raise Unsupported(f"torch {torch.__version__} has no SDPA kernel {name}", {"attention": f"sdpa:{name}"})
    with sdpa_kernel([backend]):
        yield
