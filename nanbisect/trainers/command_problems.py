"""What a training command can't do with an otherwise valid matrix. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nanbisect.matrix import Matrix
from nanbisect.matrix_command import placeholders
from nanbisect.trainers.presets import NOTHING, Preset


def problems(matrix: Matrix, preset: Preset) -> Iterator[tuple[str, str, str]]:
    """What is wrong with an otherwise valid matrix of a command or a preset."""
    command = matrix.command or preset.command
    if not command:
        yield "command", f"trainer {matrix.trainer} needs a command", "command: [python, train.py]"
        return
    if preset.after and preset.after not in command:
        what = f"the flags of {preset.name} go after the word {preset.after}, and the command has none"
        yield "command", what, f"command: [accelerate, {preset.after}, train.py]"
    used = [name for name in (*matrix.settings, *matrix.baseline) if name in matrix.flags]
    configured = any(part.config for name in used for part in matrix.flags[name].values())
    if configured and not any("config" in placeholders(word) for word in command):
        yield (
            "command",
            "no word of the command names the configuration file",
            "put {config} where the file's path goes",
        )
    if matrix.gpus_per_cell is None and any("gpus" in placeholders(word) for word in command):
        yield "gpus_per_cell", "{gpus} in the command needs a number", "gpus_per_cell: 2"
    if matrix.factor("seed"):
        yield "factors.seed", "a seed is no level: attempt k uses seed + k - 1 in every cell", "repeat: 3"
    yield from _unused(matrix, preset)
    yield from _for_sft(matrix)


def _unused(matrix: Matrix, preset: Preset) -> Iterator[tuple[str, str, str]]:
    """A model or data that the command would never hear of."""
    own = [part for levels in matrix.flags.values() for part in levels.values()]
    texts = [matrix.command or preset.command, [part.words for part in own], [part.config for part in own]]
    for name in ("model", "data"):
        told = getattr(preset, name) != NOTHING or name in placeholders(texts)
        if getattr(matrix, name) is not None and not told:
            yield name, f"the command does not use the {name}", f"put {{{name}}} where it goes in the command"


def _for_sft(matrix: Matrix) -> Iterator[tuple[str, str, str]]:
    """Keys that a command has no way to obey."""
    mend = "remove it, and give the command its own flag for it"
    if matrix.recipe is not None:
        yield "recipe", "only trainer sft has a recipe", mend
    if matrix.records:
        yield "records", "only trainer sft can choose records", mend
    if matrix.skip_records:
        yield "skip_records", "only trainer sft can choose records", mend
    if matrix.trust_remote_code:
        yield "trust_remote_code", "only trainer sft loads the model itself", mend
