"""The templates of a training command: `command` and `flags` of a matrix, and those of a preset.

A template is a list of words, or a mapping of `config.KEY: value` for the trainer's configuration file. A
setting has one for all levels, or one a level (`*`: all others). Texts hold placeholders: those of
`BUILT_IN`, `{value}` (the level, in flags only) and the name of any setting that has a value. `{{x}}` is a
plain `{x}`; braces around anything but one word, as in JSON, are text.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanbisect.matrix import ANY_LEVEL, Expansion, Flags, Setting, Vocabulary
from nanbisect.matrix_shape import Shape
from nanbisect.yaml_tree import Findings, Scalar, Tree, TreePath, did_you_mean, is_null

BUILT_IN = {
    "model": "the matrix's model, a local one as an absolute path",
    "data": "the matrix's data, a local one as an absolute path",
    "steps": "optimizer steps of this cell",
    "steps_plus_one": "one more, for trainers that save a checkpoint at the last step",
    "seed": "the attempt's seed",
    "cell_dir": "the attempt's own folder",
    "config": "the configuration file written from `config.` keys",
    "port": "a free port, for a launcher's rendezvous",
    "gpus": "the number in gpus_per_cell",
}
VALUE = "value"
CONFIG = "config."
NAME = re.compile(r"[A-Za-z_]\w*")
PLACEHOLDER = re.compile(r"\{\{(?P<plain>\w+)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")
TEMPLATE_MEND = 'write a list of words, [--flag, "{value}"], or one list a level: {on: [--flag], off: []}'


def placeholders(value: Any) -> Iterator[str]:
    """The placeholders in a text, or in all texts of a value."""
    if isinstance(value, str):
        yield from (match["name"] for match in PLACEHOLDER.finditer(value) if match["name"])
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from placeholders(key)
            yield from placeholders(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from placeholders(item)


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders filled. Raises KeyError for one without a value."""
    return PLACEHOLDER.sub(lambda match: values[match["name"]] if match["name"] else f"{{{match['plain']}}}", text)


def shown(template: Expansion) -> str:
    """A template on one line, as a shell or a configuration file would have it; empty for no words at all."""
    words = " ".join(word if re.fullmatch(r"[^\s'\"]+", word) else shlex.quote(word) for word in template.words)
    keys = (f"{CONFIG}{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in template.config.items())
    return ", ".join(part for part in (words, *keys) if part)


def plain_value(tree: Tree) -> Any:
    """A tree as JSON values; plain text is a number, a boolean or null where YAML 1.2 says so."""
    if isinstance(tree, dict):
        return {key: plain_value(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [plain_value(item) for item in tree]
    return typed(tree.text, tree.kind)


def typed(text: str, kind: str) -> Any:
    """The value of a text of that kind."""
    convert: dict[str, Callable[[str], Any]] = {
        "null": lambda text: None,
        "bool": lambda text: text.lower() == "true",
        "int": lambda text: int(text, 0) if text[:2] in ("0x", "0o") else int(text),
        "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    }
    return convert.get(kind, str)(text)


# reading ---------------------------------------------------------------------------------------


def read_flags(tree: Tree, findings: Findings, path: TreePath) -> dict[str, dict[str, Expansion]]:
    """Every setting's templates; problems go to `findings`."""
    if not isinstance(tree, dict):
        findings.add(path, "must be a mapping of settings to templates", 'write flags: {lr: [--lr, "{value}"]}')
        return {}
    return {name: read_levels(item, findings, (*path, name)) for name, item in tree.items() if _named(name, findings)}


def _named(name: str, findings: Findings) -> bool:
    """Whether a setting may have that name; a problem where it may not."""
    reserved = name in BUILT_IN and name != "seed"
    if reserved or name == VALUE:
        findings.add_at_key(("flags", name), f"{{{name}}} means something else in a command", "use another name")
    elif name.startswith(CONFIG):
        mend = f'name the setting that it belongs to: lr: {{{name}: "{{value}}"}}'
        findings.add_at_key(("flags", name), f"{name} is a key of a configuration, not a setting", mend)
    elif not NAME.fullmatch(name):
        mend = "use letters, digits and underscores, so that it can be a placeholder"
        findings.add_at_key(("flags", name), f"{name!r} can't be the name of a setting", mend)
    else:
        return True
    return False


def read_levels(tree: Tree, findings: Findings, path: TreePath) -> dict[str, Expansion]:
    """One setting's templates by level."""
    if isinstance(tree, dict) and tree and not all(key.startswith(CONFIG) for key in tree):
        return {level: read_template(item, findings, (*path, level)) for level, item in tree.items()}
    return {ANY_LEVEL: read_template(tree, findings, path)}


def read_template(tree: Tree, findings: Findings, path: TreePath) -> Expansion:
    """One template: words or keys of the configuration."""
    if isinstance(tree, dict) and tree and all(key.startswith(CONFIG) for key in tree):
        return Expansion(config={key.removeprefix(CONFIG): plain_value(item) for key, item in tree.items()})
    if not isinstance(tree, list):
        findings.add(path, "is no template", TEMPLATE_MEND)
        return Expansion()
    words = []
    for index, item in enumerate(tree):
        if not isinstance(item, Scalar) or is_null(item):
            findings.add((*path, index), "a word is one value", 'write one word; quote "{value}" and empty text')
        else:
            words.append(item.text)
    return Expansion(tuple(words))


def setting_of(name: str, levels: Mapping[str, Expansion], summary: str = "set by the matrix's flags") -> Setting:
    """The setting that templates make: with the levels named there, or with any."""
    if ANY_LEVEL in levels:
        return Setting(name, summary, str, "")
    return Setting(name, summary, one_of(tuple(levels)), "", tuple(levels))


def one_of(levels: tuple[str, ...]) -> Callable[[str], str]:
    """Takes these levels only."""

    def parse(text: str) -> str:
        if text not in levels:
            raise ValueError(f"one of {', '.join(levels)}")
        return text

    return parse


# against the matrix ----------------------------------------------------------------------------


def with_command(shape: Shape, findings: Findings, vocabulary: Vocabulary) -> tuple[Flags, Vocabulary]:
    """The matrix's own flags, and the vocabulary with the settings that its flags and command make."""
    flags = {} if shape.flags is None else read_flags(shape.flags, findings, ("flags",))
    settings = settings_of(vocabulary, shape.command or (), flags)
    valued = {*shape.settings, *shape.factors, *(name for name, item in vocabulary.settings.items() if item.default)}
    for index, word in enumerate(shape.command or ()):
        _check_text(word, findings, ("command", index), valued, inside_flags=False)
    if isinstance(shape.flags, dict):
        _check_tree(shape.flags, findings, ("flags",), valued)
    return flags, replace(vocabulary, settings=settings)


def settings_of(vocabulary: Vocabulary, command: Sequence[str], flags: Flags) -> Mapping[str, Setting]:
    """All settings of a matrix: the trainer's, and those that its own command and flags make."""
    used = [name for word in command for name in placeholders(word) if name not in BUILT_IN and name != VALUE]
    free = {name: Setting(name, "a placeholder of the command", str, "") for name in used}
    own = {name: setting_of(name, levels) for name, levels in flags.items()}
    return {**free, **vocabulary.settings, **own}


def _check_tree(tree: Tree, findings: Findings, path: TreePath, valued: Iterable[str]) -> None:
    """Look at every text of the flags."""
    if isinstance(tree, Scalar):
        _check_text(tree.text, findings, path, valued, inside_flags=True)
    else:
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            _check_tree(item, findings, (*path, key), valued)


def _check_text(text: str, findings: Findings, path: TreePath, valued: Iterable[str], *, inside_flags: bool) -> None:
    known = [*BUILT_IN, *([VALUE] if inside_flags else []), *valued]
    for name in placeholders(text):
        if name == VALUE and not inside_flags:
            mend = "name the setting instead, such as {batch_size}"
            findings.add(path, "{value} is a level, and a command has no level of its own", mend)
        elif name not in known:
            meant = did_you_mean(name, known)
            mend = f"{meant}give {name} under settings or factors, or write {{{{{name}}}}} for plain text"
            findings.add(path, f"the placeholder {{{name}}} has no value", mend)
