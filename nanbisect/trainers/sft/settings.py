"""The settings of the built-in `sft` trainer, as data: names, levels, defaults. No torch here.

The driver checks a matrix against this table, and the training process reads its values with the same
parsers, so a level means one thing on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanbisect.matrix import Matrix, Setting, Vocabulary

SWITCH = {"true": "on", "false": "off"}
SDPA_KERNELS = ("math", "flash", "efficient", "cudnn")
ATTENTION = ("eager", "sdpa", *(f"sdpa:{kernel}" for kernel in SDPA_KERNELS), "flash")
PRECISIONS = ("bf16", "fp16", "fp32")
OPTIMIZERS = ("adamw", "adamw_foreach", "adamw_fused", "sgd", "none")


def choice(*levels: str) -> Callable[[str], str]:
    """One of the levels; a switch with `on`/`off` also takes true/false."""

    def parse(text: str) -> str:
        value = SWITCH.get(text.lower(), text) if {"on", "off"} & set(levels) else text
        if value not in levels:
            raise ValueError(f"one of {', '.join(levels)}")
        return value

    return parse


def integer(least: int) -> Callable[[str], int]:
    """A whole number of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"a whole number of at least {least}") from None
        if value < least:
            raise ValueError(f"a whole number of at least {least}")
        return value

    return parse


def real(least: float, *, above: bool = False) -> Callable[[str], float]:
    """A finite number of at least (or above) `least`."""
    bound = f"{'above' if above else 'of at least'} {least:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"a number {bound}") from None
        if not math.isfinite(value) or value < least or (above and value == least):
            raise ValueError(f"a finite number {bound}")
        return value

    return parse


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`none`, or what `parse` takes."""
    return lambda text: None if text == "none" else parse(text)


def weights(text: str) -> tuple[float, ...] | None:
    """`none`, or comma-separated non-negative weights with a positive sum: `1,8`."""
    if text == "none":
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError('weights such as "1,8" (text, then all audio channels), or one a channel') from None
    if not all(math.isfinite(value) and value >= 0 for value in values) or sum(values) <= 0:
        raise ValueError("finite weights of at least 0 with a positive sum")
    return values


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "attention", "attention implementation and kernel", choice(*ATTENTION), "sdpa", ATTENTION, neutral=True
        ),
        Setting(
            "gradient_checkpointing",
            "recompute activations in backward; on is non-reentrant",
            choice("off", "on", "reentrant"),
            "off",
            ("off", "on", "reentrant"),
            neutral=True,
        ),
        Setting("batch_size", "records in a micro-batch", integer(1), "1"),
        Setting("gradient_accumulation", "micro-batches in an optimizer step", integer(1), "1", neutral=True),
        Setting("channel_weights", "weight of each channel's loss", weights, "none"),
        Setting(
            "loss_reduction",
            "how channels and tokens are averaged",
            choice("mean_per_channel", "token_weighted"),
            "mean_per_channel",
            ("mean_per_channel", "token_weighted"),
        ),
        Setting(
            "precision",
            "autocast; fp16 with a GradScaler, fp32 is none",
            choice(*PRECISIONS),
            "bf16",
            PRECISIONS,
        ),
        Setting("param_dtype", "dtype of the parameters", choice(*PRECISIONS), "fp32", PRECISIONS),
        Setting("padding_side", "where short records are padded", choice("right", "left"), "right", ("right", "left")),
        Setting("max_length", "longest record in tokens; longer ones are cut", optional(integer(2)), "none"),
        Setting(
            "optimizer",
            "none: backward only, each gradient freed as it arrives",
            choice(*OPTIMIZERS),
            "adamw",
            OPTIMIZERS,
        ),
        Setting("learning_rate", "constant over the steps", real(0), "2e-5"),
        Setting("adam_eps", "added to AdamW's denominator", real(0), "1e-8"),
        Setting("weight_decay", "decoupled for AdamW", real(0), "0"),
        Setting("max_grad_norm", "clip the gradient norm; none: only measure it", optional(real(0, above=True)), "1"),
        Setting(
            "deterministic",
            "deterministic kernels; fill also sets fresh memory to NaN",
            choice("off", "kernels", "kernels+fill"),
            "off",
            ("off", "kernels", "kernels+fill"),
        ),
        Setting("seed", "seed of attempt 1", integer(0), "0"),
    )
}

ON_A_LOADED_MODEL = frozenset(
    (
        *("attention", "gradient_checkpointing", "batch_size", "gradient_accumulation", "channel_weights"),
        *("loss_reduction", "padding_side", "max_length", "optimizer", "learning_rate", "adam_eps", "weight_decay"),
        *("max_grad_norm", "deterministic", "seed"),
    )
)
"""What cells that share one process (`--keep-model`) may differ in; a recipe that reads one of these in its model()
is loaded again for another level."""

RECIPES: Mapping[str, tuple[str, ...]] = {
    "causal-lm": (
        "any causal language model, in nanbisect's own training loop",
        "The data are JSON lines: chat `messages`, `prompt` and `completion`, `text`, or `input_ids` with `labels`;",
        "and an `id`, where there is one.",
    )
}
"""Built-in recipes: what it is, then what its user must know."""


def parse(settings: Mapping[str, str]) -> dict[str, Any]:
    """Every setting's value, defaults filled in. Raises ValueError naming the setting."""
    values = {}
    for name, setting in SETTINGS.items():
        try:
            values[name] = setting.parse(settings.get(name, setting.default))
        except ValueError as error:
            raise ValueError(f"{name}: {settings.get(name)!r} is not {error}") from None
    return values


def check(matrix: Matrix) -> Sequence[tuple[str, str, str]]:
    """What the `sft` trainer can't do with an otherwise valid matrix."""
    problems = []
    if matrix.recipe is None:
        mend = f"recipe: {next(iter(RECIPES))}, or the path of a Python file with your recipe"
        problems.append(("recipe", "trainer sft needs a recipe", mend))
    if matrix.gpus_per_cell != 1:
        problems.append(("gpus_per_cell", "trainer sft trains on one GPU", "leave it out"))
    if matrix.factor("seed"):
        problems.append(("factors.seed", "a seed is no level: attempt k uses seed + k - 1 in every cell", "repeat: 3"))
    if matrix.recipe == "causal-lm" and (where := _where(matrix, "channel_weights")):
        mend = "remove it, or write a recipe that returns one loss a channel"
        problems.append((where, "the causal-lm recipe has one channel, text, so there is nothing to weigh", mend))
    return problems


def _where(matrix: Matrix, name: str) -> str | None:
    if matrix.factor(name):
        return f"factors.{name}"
    return f"settings.{name}" if name in matrix.settings else None


VOCABULARY = Vocabulary(settings=SETTINGS, recipes=tuple(RECIPES), check=check)
