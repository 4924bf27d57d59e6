"""Requested is not resolved: which setting of a cell did not become what the matrix asked for.

Pure; reads the account of the training process and what the probe saw in the graph of the first step.
What can't be seen (no attention node at all in a model that asked for none) is not held against a cell
unless the matrix varies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ON = {"true": "on", "false": "off"}
CLASSES = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
RECIPES_OWN = ("attention", "padding_side", "max_length")
NODES = {
    "math": ("SafeSoftmaxBackward0",),
    "flash": ("ScaledDotProductFlashAttention",),
    "efficient": ("ScaledDotProductEfficientAttention",),
    "cudnn": ("ScaledDotProductCudnnAttention",),
}
ANY_SDPA = ("ScaledDotProduct", "SafeSoftmaxBackward0")
FLASH = ("FlashAttn", "_flash_attn", "FlashAttention2")


def not_in_effect(settings: Mapping[str, str], factors: frozenset[str], resolved: Mapping[str, Any]) -> str | None:
    """The first setting that was not resolved as requested, in words; None if all were.

    `settings` is the text of every setting given, fixed or as this cell's level; `factors` names those
    that the matrix varies.
    """
    return next(_mismatches(settings, factors, resolved), None)


def _mismatches(settings: Mapping[str, str], factors: frozenset[str], resolved: Mapping[str, Any]) -> Iterator[str]:
    read = resolved.get("read_by_recipe")
    for name in RECIPES_OWN:
        if name in factors and read is not None and name not in read:
            yield f"the recipe never read settings.{name}"
    if "attention" in settings:
        yield from _attention(settings["attention"], "attention" in factors, resolved)
    if "gradient_checkpointing" in settings:
        level = settings["gradient_checkpointing"]
        yield from _checkpointing(ON.get(level, level), resolved)
    if "param_dtype" in settings:
        yield from _dtype(settings["param_dtype"], resolved)


def _attention(level: str, varied: bool, resolved: Mapping[str, Any]) -> Iterator[str]:
    base, _, kernel = level.partition(":")
    chosen = resolved.get("attention_class")
    if chosen is not None and chosen != CLASSES[base]:
        yield f"attention={level} was asked for, and the model's attention is {chosen}"
    seen = resolved.get("kernels", {})
    wanted = FLASH if base == "flash" else NODES.get(kernel, ANY_SDPA if base == "sdpa" else ("SoftmaxBackward0",))
    if any(_is(node, wanted) for node in seen):
        return
    if seen:
        yield f"attention={level} was asked for, and the graph shows {', '.join(sorted(seen))}"
    elif varied and chosen is None:
        yield f"attention={level} was asked for, and the graph shows no attention at all"


def _is(node: str, wanted: tuple[str, ...]) -> bool:
    return any(node == name or (name != "SoftmaxBackward0" and name in node) for name in wanted)


def _checkpointing(level: str, resolved: Mapping[str, Any]) -> Iterator[str]:
    nested, recomputed = resolved.get("nested", 0), resolved.get("recomputed", 0)
    if level == "off" and (nested or recomputed):
        yield f"gradient_checkpointing=off was asked for, and {recomputed} modules ran again in backward"
    if level == "on" and not (recomputed and not nested):
        found = "checkpointing was reentrant" if nested else "nothing was recomputed in backward"
        yield f"gradient_checkpointing=on was asked for, and {found}"
    if level == "reentrant" and not nested:
        found = "checkpointing was not reentrant" if recomputed else "nothing was recomputed in backward"
        yield f"gradient_checkpointing=reentrant was asked for, and {found}"


def _dtype(level: str, resolved: Mapping[str, Any]) -> Iterator[str]:
    """Judged by the commonest: transformers keeps a few sensitive parameters in fp32."""
    dtypes: Mapping[str, int] = resolved.get("parameter_dtypes", {})
    if dtypes and max(dtypes, key=lambda name: dtypes[name]) != DTYPES[level]:
        yield f"param_dtype={level} was asked for, and the parameters are {', '.join(sorted(dtypes))}"
