"""A starter as the text of a matrix file: commented, ready to edit. Pure."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from nanbisect.matrix import ANY_LEVEL, Expansion, Factor, Flags, Setting
from nanbisect.matrix_command import CONFIG, shown
from nanbisect.suspects import SUSPECTS
from nanbisect.trainers.presets import NOTHING, Preset
from nanbisect.trainers.starters import Starter, own_flags

WIDTH = 118
COLUMN = 40  # where comments begin, behind what is short enough
YOURS = "<--"
PLAIN = re.compile(r"[A-Za-z0-9_./+-][\w./+=-]*")
NOT_PLAIN = re.compile(r"(?i)yes|no|y|n|null|[-+]?0\d+|-+|\.+")


def starter_text(starter: Starter, *, name: str, file: str) -> str:
    """The whole file. `name` is the matrix's, `file` where it will lie."""
    sections = (
        _head(starter, file),
        _keys(starter, name),
        _flags(starter),
        _settings(starter),
        _factors(starter),
        _exclude(starter),
        _reference(starter),
    )
    return "\n".join("\n".join(section) + "\n" for section in map(list, sections) if section)


# YAML ------------------------------------------------------------------------------------------


def word(text: str) -> str:
    """A text as YAML that reads back as that text, in any place."""
    if PLAIN.fullmatch(text) and not NOT_PLAIN.fullmatch(text):
        return text
    return json.dumps(text, ensure_ascii=False)


def listed(words: Sequence[str]) -> str:
    """`[a, "1,8"]`."""
    return f"[{', '.join(map(word, words))}]"


def template(item: Expansion) -> str:
    """One template of `flags`."""
    keys = ", ".join(f"{CONFIG}{key}: {json.dumps(value)}" for key, value in item.config.items())
    return f"{{{keys}}}" if keys else listed(item.words)


def levels_of(flags: Mapping[str, Expansion]) -> str:
    """A setting's templates: one for all levels, or one a level."""
    if list(flags) == [ANY_LEVEL]:
        return template(flags[ANY_LEVEL])
    return f"{{{', '.join(f'{word(level)}: {template(item)}' for level, item in flags.items())}}}"


def commented(line: str, comment: str) -> str:
    """A line with its comment behind it, in a column, on as many lines as the comment needs."""
    first, *more = _wrap(comment, max(WIDTH - 2 - max(COLUMN, len(line)), 40)) or [""]
    return "\n".join([f"{line:<{COLUMN}} # {first}".rstrip(), *(f"{'':<{COLUMN}} # {text}" for text in more)])


def wrapped(text: str, indent: str = "", *, hanging: str = "") -> list[str]:
    """Comment lines of a text."""
    return _wrap(text, WIDTH, first=f"{indent}# ", rest=f"{indent}# {hanging}")


def _wrap(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


# sections --------------------------------------------------------------------------------------


def _head(starter: Starter, file: str) -> Iterator[str]:
    """What it is, what to know, and what to run."""
    title, *notes = starter.about
    yield from wrapped(f"A first matrix for {title}: which setting brings the NaN?")
    if notes:
        yield "#"
        yield from (f"# {line}".rstrip() for line in notes)
    yield "#"
    quoted = shlex.quote(file)
    commands = {
        f"nanbisect plan {quoted}": "the cells, their order, and what this machine can't run",
        f"nanbisect run {quoted}": "train them: the verdict, and a report to paste into an issue",
        "nanbisect watch -- YOUR COMMAND": "or watch one training command, left alone",
    }
    width = max(map(len, commands))
    yield from (f"#     {command:<{width}}   # {why}" for command, why in commands.items())
    yield "#"
    yield f"# What is marked {YOURS} is yours to fill in; the rest can stay as it is."


def _keys(starter: Starter, name: str) -> Iterator[str]:
    """Everything that is one line."""
    yield f"name: {word(name)}"
    yield f"trainer: {word(starter.trainer)}"
    if starter.recipe:
        comment = f"{YOURS} relative to this file" if "recipe" in starter.asks else ""
        yield commented(f"recipe: {word(starter.recipe)}", comment)
    if starter.command:
        comment = f"{YOURS} your own, with its own flags" if "command" in starter.asks else "more of its flags go here"
        yield commented(f"command: {listed(starter.command)}", comment)
    for key in ("model", "data"):
        if key in starter.asks:
            yield commented(f"{key}: {word(starter.asks[key])}", f"{YOURS} {_what(starter, key)}")
        elif key in starter.leaves:
            text, when = starter.leaves[key]
            yield commented(f"# {key}: {word(text)}", when)
    yield from _records(starter)
    yield commented("workdir: .", "of the training, relative to this file")
    only = "; ACCELERATE_*, ranks, ports and trackers reach it only from here" if starter.command else ""
    yield commented('env: {TOKENIZERS_PARALLELISM: "false"}', f"variables of the training{only}")
    yield commented("steps: 3", "optimizer steps of the cells with the largest batch; smaller ones take more")
    yield commented("timeout: 30m", "of one cell")
    yield commented("# repeat: 3", "attempts a cell, each with its own seed, where the NaN comes and goes")
    yield commented("# device: cpu", "or cuda; without this line a GPU where there is one")
    if starter.command:
        yield commented("# gpus_per_cell: 2", "or all; one GPU without this line")


def _what(starter: Starter, key: str) -> str:
    """What may stand there."""
    if key == "model":
        return "a local folder or a hub id; or --model-path"
    if starter.command:
        return "a local file or folder, or a name that the trainer knows; or --train-jsonl"
    return "relative to this file; or --train-jsonl"


def _records(starter: Starter) -> Iterator[str]:
    if starter.command:
        yield "# records: a command reads its own, so put the batch that failed into its data"
    else:
        yield commented("# records: [utt17, utt93]", "only these ids, the batch that failed; or skip_records: 9000")


def _flags(starter: Starter) -> Iterator[str]:
    """Settings of the command's own. Where the preset leaves suspects to the script, an example as a comment."""
    if starter.flags:
        yield commented("flags:", f"{YOURS} what each setting becomes; {{value}} is its level")
        yield from (f"  {name}: {levels_of(levels)}" for name, levels in starter.flags.items())
        return
    known = starter.vocabulary.settings
    missing: Flags = {name: levels for name, levels in own_flags().items() if name not in known and name in SUSPECTS}
    if missing and starter.command:
        yield commented("# flags:", "what your script has flags for can be a factor, too")
        yield from (f"#   {name}: {levels_of(levels)}" for name, levels in missing.items())


def _settings(starter: Starter) -> Iterator[str]:
    """What every cell has."""
    fixed, known = starter.fixed, starter.vocabulary.settings
    if not fixed:
        yield commented("# settings: {seed: 0}", "the same in every cell")
        return
    yield commented("settings:", "the same in every cell: as in the run that failed")
    for name, level in fixed.items():
        mark = f"{YOURS} " if name in starter.asks else ""
        yield commented(f"  {name}: {word(level)}", f"{mark}{known[name].summary}")


def _factors(starter: Starter) -> Iterator[str]:
    """The suspects, each with the reason, and those that had no room."""
    chosen = starter.factors
    yield commented("factors:", f"under suspicion, the first level is the safe one: {starter.cells} cells")
    for factor in chosen:
        yield from wrapped(SUSPECTS[factor.name].why, "  ")
        yield f"  {factor.name}: {listed(factor.levels)}"
    others = [factor for factor in starter.suspects if factor not in chosen]
    if others:
        yield "  # Further suspects, to take the place of one of these (more factors are many more cells):"
    yield from (_further(factor) for factor in others)


def _further(factor: Factor) -> str:
    return commented(f"  # {factor.name}: {listed(factor.levels)}", SUSPECTS[factor.name].why)


def _exclude(starter: Starter) -> Iterator[str]:
    """What no machine can run."""
    rules = starter.exclude
    if rules:
        yield "exclude:"
        yield from (commented(f"  - {_rule(rule)}", why) for rule, why in rules)
    else:
        example = {factor.name: factor.levels[-1] for factor in starter.factors[:2]}
        yield commented(f"# exclude: [{_rule(example)}]", "cells to leave out: those that match any rule")


def _rule(levels: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{name}: {word(level)}' for name, level in levels.items())}}}"


# what the settings are -------------------------------------------------------------------------


def _reference(starter: Starter) -> Iterator[str]:
    """Every setting of the trainer, as a comment: its levels, and what a preset makes of them."""
    preset = starter.templates
    flags: Flags = preset.flags if preset else {}
    settings = {name: item for name, item in starter.vocabulary.settings.items() if name not in starter.flags}
    if set(settings) == {"seed"}:
        return
    yield f"# All settings of this trainer{', and what their levels become' if flags else ''}:"
    lines = "".join(line for levels in flags.values() for line in _becomes(levels))
    if "|--" in lines:
        yield "# (of --one|--other the first name that the installed trainer has)"
    if CONFIG in lines:
        yield f"# ({CONFIG}KEY is a key of the file that nanbisect writes for {{config}})"
    for name, setting in settings.items():
        yield "#"
        yield from wrapped(f"{name}: {setting.summary}{_takes(setting)}", hanging="  ")
        yield from (f"#   {line}" for line in _becomes(flags.get(name, {})))
    if preset:
        yield from _always(preset)


def _takes(setting: Setting) -> str:
    """Its levels, or what its parser asks for, and the default, in brackets."""
    text = ", ".join(setting.choices)
    try:
        setting.parse("?")
    except ValueError as error:
        text = text or f"{error}{', or none' if setting.takes('none') else ''}"
    parts = [text, f"default {setting.default}" if setting.default else ""]
    return f" ({'; '.join(part for part in parts if part)})" if any(parts) else ""


def _becomes(levels: Mapping[str, Expansion]) -> Iterator[str]:
    """What each level becomes; a setting with one template for all levels has one line."""
    width = max((len(level) for level in levels), default=0)
    for level, item in levels.items():
        yield shown(item) if list(levels) == [ANY_LEVEL] else f"{level:<{width}}  {shown(item) or 'nothing'}"


def _always(preset: Preset) -> Iterator[str]:
    """What no setting changes."""
    parts = {"model": preset.model, "data": preset.data, "always": preset.arguments, "always, and last": preset.forced}
    for name, item in parts.items():
        if item != NOTHING:
            yield "#"
            yield from wrapped(f"{name}: {shown(item)}", hanging="  ")
