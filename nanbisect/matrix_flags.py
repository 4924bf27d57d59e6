"""The flags of the command line, laid over the tree of the matrix file before anything is checked.

So one set of checks serves both; a problem with what a flag said names the flag instead of a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanbisect.yaml_tree import Findings, Place, Scalar, Tree, TreePath, is_null, kind_of


@dataclass(frozen=True)
class Overrides:
    """What the command line says over the matrix file; None is "not said".

    `settings` holds `k=v` from `--set`, `factors` holds `k=a|b` from `--factor`.
    """

    model: str | None = None
    data: str | None = None
    steps: int | None = None
    repeat: int | None = None
    timeout: str | None = None
    device: str | None = None
    settings: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()


NO_OVERRIDES = Overrides()
FLAGS = {
    "model": "--model-path",
    "data": "--train-jsonl",
    "steps": "--steps",
    "repeat": "--repeat",
    "timeout": "--timeout",
    "device": "--device",
}


def overlay(tree: dict[str, Tree], overrides: Overrides, findings: Findings) -> dict[str, Tree]:
    """The tree as if the flags had been written in it; their places say which flag."""
    for key, flag in FLAGS.items():
        value = getattr(overrides, key)
        if value is not None:
            tree = {**tree, key: Scalar(str(value), kind_of(str(value)))}
            findings.places[(key,)] = Place(shown=f"{flag} {value}")
    fixed = _pairs("--set", overrides.settings, findings)
    varied = _pairs("--factor", overrides.factors, findings)
    settings: dict[str, Tree] = {name: Scalar(text, "str") for name, text in fixed.items()}
    factors: dict[str, Tree] = {name: _levels(text) for name, text in varied.items()}
    _mark("settings", "--set", fixed, findings)
    _mark("factors", "--factor", varied, findings)
    sections = {
        "settings": _merged(tree.get("settings"), settings, gone=factors),
        "factors": _merged(tree.get("factors"), factors, gone=settings),
    }
    return {**tree, **sections}


def _pairs(flag: str, items: Sequence[str], findings: Findings) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        name, equals, text = (part.strip() for part in item.partition("="))
        if not name or not equals:
            value = "'NAME=SAFE|OTHER'" if flag == "--factor" else "NAME=VALUE"
            findings.add((f"{flag} {item}",), "no name and value", f"write {flag} {value}")
        elif name in pairs:
            findings.add((f"{flag} {item}",), f"{name} is given twice", "keep one of them")
        else:
            pairs[name] = text
    return pairs


def _levels(text: str) -> list[Tree]:
    return [Scalar(level.strip(), "str") for level in text.split("|")] if text else []


def _mark(section: str, flag: str, pairs: Mapping[str, str], findings: Findings) -> None:
    for name, text in pairs.items():
        place = Place(shown=f"{flag} {name}={text}")
        path: TreePath = (section, name)
        findings.keys[path] = place
        for item in (path, *((*path, index) for index in range(text.count("|") + 1))):
            findings.places[item] = place


def _merged(section: Tree | None, added: dict[str, Tree], *, gone: Iterable[str]) -> Tree:
    if section is None or is_null(section):
        section = {}
    if not isinstance(section, dict):
        return section
    return {**{name: value for name, value in section.items() if name not in gone}, **added}
