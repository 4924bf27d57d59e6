"""Trainers as data: one YAML file each in `presets/`, read with the reader of matrices.

    about: |                    what it is, on the first line; then what a user must know
    command: [trl, sft]         how the trainer is started; a matrix's own `command` replaces it
    after: launch               the preset's words go after this word of the command (default: at its end)
    model: [--model, "{model}"] words or `config.` keys, where the matrix gives a model; `data` likewise
    arguments: [...]            always there
    forced: [...]               always there, and last
    settings:
      batch_size:
        summary: ...
        neutral: true           must not change the mathematics of training
        kind: integer           integer, number, weights or text: what a `{value}` may be (default: text)
        default: ...            for a setting that is only a placeholder
        flags: [--batch-size, "{value}"]      as in a matrix
        needs: {flash: flash_attn}            packages (a|b: either) and a GPU without which a level can't run
    example: {command: [...], data: ..., settings: {...}, flags: {...}}    for `init`, what only a user can know
    parsers: [trl/trainer/sft_config.py, "{script}"]  files that define the flags, to ask the installed trainer

A flag or key with several names across versions is written `--new|--old`; the installed trainer decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanbisect.errors import MatrixError
from nanbisect.matrix import ANY_LEVEL, Expansion, Flags, Setting
from nanbisect.matrix_command import plain_value, read_flags, read_levels, read_template, setting_of
from nanbisect.trainers.sft.settings import integer, real, weights
from nanbisect.yaml_tree import Findings, Scalar, Tree, UnreadableError, parse_tree

FOLDER = Path(__file__).parent / "presets"
PLAIN = "command"  # the preset that knows no flag: any command
KEYS = ("about", "example", "command", "after", "model", "data", "arguments", "forced", "settings", "parsers")
EXAMPLE_KEYS = ("command", "data", "settings", "flags")
SETTING_KEYS = ("summary", "neutral", "kind", "default", "flags", "needs")
KINDS: Mapping[str, Callable[[str], Any]] = {
    "integer": integer(1),
    "natural": integer(0),
    "number": real(0),
    "weights": weights,
    "text": str,
}
NOTHING = Expansion()
SEED = Setting("seed", "seed of attempt 1", integer(0), "0")


@dataclass(frozen=True)
class Example:
    """What a first matrix has where only its user can know."""

    command: tuple[str, ...] = ()
    data: str = "./train.jsonl"
    settings: Mapping[str, str] = field(default_factory=dict)
    flags: Flags = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """What is known of a trainer. The plain `command` trainer is nearly empty."""

    name: str
    about: tuple[str, ...] = ()
    example: Example = Example()
    command: tuple[str, ...] = ()
    after: str = ""
    model: Expansion = NOTHING
    data: Expansion = NOTHING
    arguments: Expansion = NOTHING
    forced: Expansion = NOTHING
    settings: Mapping[str, Setting] = field(default_factory=dict)
    flags: Flags = field(default_factory=dict)
    needs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    parsers: tuple[str, ...] = ()


def names() -> tuple[str, ...]:
    """The presets there are, without the plain command."""
    return tuple(sorted({path.name.removesuffix(".yaml") for path in FOLDER.glob("*.yaml")} - {PLAIN}))


def load(name: str) -> Preset:
    """The preset of that name."""
    path = FOLDER / f"{name}.yaml"
    return read(path.read_text(encoding="utf-8"), name)


def read(text: str, name: str) -> Preset:
    """A preset's text. Raises MatrixError with all that is wrong."""
    findings = Findings()
    try:
        tree = parse_tree(text, findings)
    except UnreadableError as error:
        raise MatrixError(name, [error.problem]) from None
    _known(tree, KEYS, findings, ())
    parts = {
        key: read_template(tree[key], findings, (key,))
        for key in ("command", "model", "data", "arguments", "forced", "parsers")
        if key in tree
    }
    settings = tree.get("settings", {})
    entries = settings if isinstance(settings, dict) else {}
    flags = {
        key: read_levels(entry["flags"], findings, ("settings", key, "flags"))
        for key, entry in entries.items()
        if isinstance(entry, dict) and "flags" in entry
    }
    known = {key: _setting(key, entry, flags.get(key), findings) for key, entry in entries.items()}
    example = _example(tree.get("example", {}), findings)
    if findings.problems:
        raise MatrixError(name, findings.problems)
    return Preset(
        name=name,
        about=tuple(str(plain_value(tree["about"])).splitlines()) if "about" in tree else (),
        example=example,
        command=parts.pop("command", NOTHING).words,
        after=str(plain_value(tree["after"])) if "after" in tree else "",
        parsers=parts.pop("parsers", NOTHING).words,
        settings={"seed": SEED, **known},
        flags=flags,
        needs={key: plain_value(e["needs"]) for key, e in entries.items() if isinstance(e, dict) and "needs" in e},
        **parts,
    )


def _known(tree: Mapping[str, Tree], keys: tuple[str, ...], findings: Findings, path: tuple[str, ...]) -> None:
    for key in tree:
        if key not in keys:
            findings.add_at_key((*path, key), f"unknown key {key!r}", f"known keys: {', '.join(keys)}")


def _example(tree: Tree, findings: Findings) -> Example:
    if not isinstance(tree, dict):
        findings.add(("example",), "must be a mapping", f"known keys: {', '.join(EXAMPLE_KEYS)}")
        return Example()
    _known(tree, EXAMPLE_KEYS, findings, ("example",))
    command = read_template(tree["command"], findings, ("example", "command")) if "command" in tree else NOTHING
    settings, flags = tree.get("settings", {}), tree.get("flags", {})
    return Example(
        command=command.words,
        data=str(plain_value(tree["data"])) if "data" in tree else Example.data,
        settings={key: item.text for key, item in settings.items() if isinstance(item, Scalar)}
        if isinstance(settings, dict)
        else {},
        flags=read_flags(flags, findings, ("example", "flags")),
    )


def _setting(name: str, entry: Tree, levels: Mapping[str, Expansion] | None, findings: Findings) -> Setting:
    path = ("settings", name)
    if not isinstance(entry, dict):
        findings.add(path, "must be a mapping", f"known keys: {', '.join(SETTING_KEYS)}")
        return Setting(name, "", str, "")
    _known(entry, SETTING_KEYS, findings, path)
    values = plain_value({key: item for key, item in entry.items() if key not in ("flags", "needs")})
    kind = values.get("kind", "text")
    if kind not in KINDS:
        findings.add((*path, "kind"), f"unknown kind {kind!r}", f"use one of {', '.join(KINDS)}")
    summary, neutral = str(values.get("summary", "")), bool(values.get("neutral", False))
    if levels is not None and ANY_LEVEL not in levels:
        made = setting_of(name, levels)
        return Setting(name, summary, made.parse, "", made.choices, neutral)
    return Setting(name, summary, KINDS.get(kind, str), str(values.get("default", "")), neutral=neutral)
