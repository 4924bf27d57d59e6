"""A cell's settings -> the words of its command and the keys of its configuration file. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanbisect.matrix import ANY_LEVEL, Expansion, Flags, Matrix
from nanbisect.matrix_command import VALUE, fill, typed
from nanbisect.trainers.presets import Preset
from nanbisect.yaml_tree import kind_of

ALTERNATIVES = re.compile(r"--[\w-]+(\|--[\w-]+)+")
ONLY_A_PLACEHOLDER = re.compile(r"\{[A-Za-z_]\w*\}")


@dataclass
class Parts:
    """Words and keys, not yet filled: `base` the command, `ours` the preset's, `own` the matrix's flags."""

    base: list[str]
    ours: list[Expansion] = field(default_factory=list)
    own: list[Expansion] = field(default_factory=list)
    forced: Expansion = field(default_factory=Expansion)

    @property
    def expansions(self) -> list[Expansion]:
        """All but the command, in the order in which later keys win."""
        return [*self.ours, *self.own, self.forced]

    def argv(self, after: str) -> list[str]:
        """The whole command: the preset's words after the word `after`, or at the end."""
        ours, own = ([word for part in parts for word in part.words] for parts in (self.ours, self.own))
        if after and after in self.base:
            place = self.base.index(after) + 1
            return [*self.base[:place], *ours, *self.forced.words, *self.base[place:], *own]
        return [*self.base, *ours, *own, *self.forced.words]


def parts_of(matrix: Matrix, preset: Preset, settings: Mapping[str, str]) -> Parts:
    """What makes the command under these settings; every template has its `{value}` filled."""
    ours = [preset.model] if matrix.model is not None else []
    ours += [preset.data] if matrix.data is not None else []
    flags = {name: levels for name, levels in preset.flags.items() if name not in matrix.flags}
    return Parts(
        base=list(matrix.command or preset.command),
        ours=[*ours, preset.arguments, *expand_flags(flags, settings)],
        own=list(expand_flags(matrix.flags, settings)),
        forced=preset.forced,
    )


def expand_flags(flags: Flags, settings: Mapping[str, str]) -> Iterator[Expansion]:
    """The template of each setting that has a level, filled with that level."""
    for name, levels in flags.items():
        if name in settings:
            level = settings[name]
            template = levels.get(level, levels.get(ANY_LEVEL, Expansion()))
            yield _with_value(template, level)


def _with_value(template: Expansion, level: str) -> Expansion:
    level = re.sub(r"\{(\w+)\}", r"{{\1}}", level)  # a level is text, whatever it looks like

    def put(text: str) -> str:
        return re.sub(r"(?<!\{)\{value\}", lambda match: level, text)

    words = tuple(put(word) for word in template.words)
    return Expansion(words, {key: _mapped(value, {VALUE: level}, put) for key, value in template.config.items()})


def fill_all(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Every word with its placeholders filled."""
    return tuple(fill(word, values) for word in words)


def config_of(expansions: Sequence[Expansion], values: Mapping[str, str], base: Mapping[str, Any]) -> dict[str, Any]:
    """The nested mapping that dotted keys make, laid over `base`; later keys win."""
    found: dict[str, Any] = dict(base)
    for part in expansions:
        for key, value in part.config.items():
            _put(found, key.split("."), _mapped(value, values, lambda text: fill(text, values)))
    return found


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = tree.get(name)
        tree[name] = dict(inner) if isinstance(inner, dict) else {}
        tree = tree[name]
    tree[path[-1]] = value


def _mapped(value: Any, values: Mapping[str, str], put: Callable[[str], str]) -> Any:
    """Filled texts; one that was nothing but a placeholder becomes a number or boolean where it reads as one."""
    if isinstance(value, Mapping):
        return {key: _mapped(item, values, put) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, values, put) for item in value]
    if isinstance(value, str):
        alone = ONLY_A_PLACEHOLDER.fullmatch(value) is not None and value[1:-1] in values
        text = put(value)
        return typed(text, kind_of(text)) if alone else text
    return value


def resolved_names(words: Sequence[str], known: Callable[[], frozenset[str]]) -> tuple[str, ...]:
    """Words where `--new|--old` became the first name that the installed trainer knows, else the last.

    `known` is asked only when there is something to ask.
    """
    return tuple(chosen(word.split("|"), known()) if ALTERNATIVES.fullmatch(word) else word for word in words)


def resolved_keys(part: Expansion, known: Callable[[], frozenset[str]]) -> Expansion:
    """The same for the keys of a configuration file."""
    keys = {key: chosen(key.split("|"), known()) if "|" in key else key for key in part.config}
    return Expansion(part.words, {keys[key]: value for key, value in part.config.items()})


def chosen(names: Sequence[str], known: frozenset[str]) -> str:
    """The first known name, else the last: the older one, which lives longest."""
    return next((name for name in names if plain(name) in known), names[-1])


def plain(name: str) -> str:
    """`--gradient-checkpointing` as parsers store it."""
    return name.lstrip("-").replace("-", "_")


def flag_names(parts: Sequence[Expansion]) -> list[list[str]]:
    """The flags and keys that a trainer must know, each with its other names."""
    words = [word for part in parts for word in part.words if re.fullmatch(r"--[A-Za-z][\w-]*(\|--[\w-]+)*", word)]
    keys = [key.split(".")[0] for part in parts for key in part.config]
    return [[plain(name) for name in item.split("|")] for item in dict.fromkeys((*words, *keys))]
