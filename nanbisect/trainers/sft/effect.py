"""Requested is not resolved: which setting of a cell did not become what the matrix asked for.

Pure; reads the account of the training process and what the probe saw in the graph of the first step.
What the trainer or transformers applies is checked strictly. What a recipe of the user's makes of
`attention` is its own affair, as long as it asks: hand-written code under the name sdpa is a doubt that
stands beside the claim. A recipe that never reads a factor can't have applied it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nanbisect.evidence import Effect
from nanbisect.outcome import Note

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


def effect_of(settings: Mapping[str, str], factors: frozenset[str], resolved: Mapping[str, Any]) -> Effect:
    """Whether the settings were resolved as requested.

    `settings` is the text of every setting given, fixed or as this cell's level; `factors` names those
    that the matrix varies.
    """
    return Effect(next(_mismatches(settings, factors, resolved), None), tuple(_doubts(settings, factors, resolved)))


def _mismatches(settings: Mapping[str, str], factors: frozenset[str], resolved: Mapping[str, Any]) -> Iterator[str]:
    read = resolved.get("read_by_recipe")
    for name in RECIPES_OWN:
        if name in factors and read is not None and name not in read:
            yield f"the recipe never read settings.{name}"
    if "attention" in settings:
        yield from _attention(settings["attention"], resolved)
    if "gradient_checkpointing" in settings:
        level = settings["gradient_checkpointing"]
        yield from _checkpointing(ON.get(level, level), resolved)
    yield from _autocast(settings.get("precision", "bf16"), resolved)
    if "param_dtype" in settings:
        yield from _dtype(settings["param_dtype"], resolved)


def _doubts(settings: Mapping[str, str], factors: frozenset[str], resolved: Mapping[str, Any]) -> Iterator[Note]:
    """An attention of the recipe's own that looks otherwise than its level's name, where that name matters."""
    level = settings.get("attention")
    if level is None or "attention" not in factors or ":" in level or resolved.get("attention_class") is not None:
        return
    seen = resolved.get("kernels", {})
    if not any(_is(node, _wanted(level)) for node in seen):
        shows = f"shows {', '.join(sorted(seen))}" if seen else "shows no attention that nanbisect knows"
        yield Note("attention_otherwise", f"the recipe was asked for attention={level}, and the graph {shows}")


def _attention(level: str, resolved: Mapping[str, Any]) -> Iterator[str]:
    """transformers' choice by its name, and a kernel that the trainer forced by what the graph shows."""
    chosen, seen = resolved.get("attention_class"), resolved.get("kernels", {})
    if chosen is not None and chosen != CLASSES[level.partition(":")[0]]:
        yield f"attention={level} was asked for, and the model's attention is {chosen}"
    strict = ":" in level or (chosen is not None and bool(seen))
    if strict and not any(_is(node, _wanted(level)) for node in seen):
        shows = ", ".join(sorted(seen)) or "no attention at all"
        yield f"attention={level} was asked for, and the graph shows {shows}"


def _wanted(level: str) -> tuple[str, ...]:
    """Graph nodes of which one must be there."""
    base, _, kernel = level.partition(":")
    if base == "flash":
        return FLASH
    return NODES.get(kernel, ANY_SDPA if base == "sdpa" else ("SoftmaxBackward0",))


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


def _autocast(level: str, resolved: Mapping[str, Any]) -> Iterator[str]:
    """What was open while the recipe computed its losses."""
    if "autocast" not in resolved:
        return
    wanted = None if level == "fp32" else DTYPES[level]
    if resolved["autocast"] != wanted:
        yield f"precision={level} was asked for, and autocast was {resolved['autocast'] or 'off'}"


def _dtype(level: str, resolved: Mapping[str, Any]) -> Iterator[str]:
    """Judged by the commonest: transformers keeps a few sensitive parameters in fp32."""
    dtypes: Mapping[str, int] = resolved.get("parameter_dtypes", {})
    if dtypes and max(dtypes, key=lambda name: dtypes[name]) != DTYPES[level]:
        yield f"param_dtype={level} was asked for, and the parameters are {', '.join(sorted(dtypes))}"
