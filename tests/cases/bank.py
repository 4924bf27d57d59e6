"""The cases: small trainings whose fault is known, and healthy ones, as data beside their scripts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
INFINITE = ("+inf", "-inf")


@dataclass(frozen=True)
class Becomes:
    """Where the Inf turns into NaN."""

    operations: tuple[str, ...]
    module: str | None
    line: int | None


@dataclass(frozen=True)
class Truth:
    """Where the first bad value is born. `kinds` and `operations`: any of them; None in the others: not the point."""

    phase: str
    kinds: tuple[str, ...]
    operations: tuple[str, ...]
    module: str | None
    line: int
    becomes: Becomes | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    use: str | None = None


@dataclass(frozen=True)
class Case:
    """One training. `truth` is None for a healthy one; `causes` are the catalogue's codes that it must bring."""

    name: str
    script: Path
    arguments: tuple[str, ...] = ()
    truth: Truth | None = None
    causes: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        """The first sentence of the script."""
        return " ".join(self.script.read_text(encoding="utf-8").split('"""')[1].split("\n\n")[0].split())


@functools.cache
def sick() -> tuple[Case, ...]:
    """Every faulty training, one for each argument it takes."""
    table = yaml.safe_load((HERE / "truths.yaml").read_text(encoding="utf-8"))
    return tuple(
        _case(name, entry, argument) for name, entry in table.items() for argument in entry.get("arguments", [None])
    )


@functools.cache
def healthy() -> tuple[Case, ...]:
    """Every training in which nothing is wrong."""
    return tuple(Case(path.stem, path) for path in sorted((HERE / "healthy").glob("*.py")))


def chosen(names: list[str]) -> list[Case]:
    """The cases of these names (`masked_rows` stands for all its arguments); all without a name."""
    every = [*sick(), *healthy()]
    unknown = [name for name in names if not any(name in (case.name, case.script.stem) for case in every)]
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; known: {', '.join(case.name for case in every)}")
    return [case for case in every if not names or {case.name, case.script.stem} & set(names)]


def _case(name: str, entry: Mapping[str, Any], argument: str | None) -> Case:
    script = HERE / "sick" / f"{name}.py"
    entry = {
        key: value[argument] if isinstance(value, dict) and argument in value else value for key, value in entry.items()
    }
    text, module = script.read_text(encoding="utf-8"), entry["module"]
    kinds = INFINITE if entry["kind"] == "any-inf" else (entry["kind"],)
    truth = Truth(
        entry["phase"],
        kinds,
        tuple(entry["operations"]),
        module if module is None else module.replace("{argument}", argument or ""),
        _marked(text, "origin", argument),
        _becomes(text, entry.get("becomes"), argument),
        {key: entry[key] for key in ("label", "name", "node", "forward_was_finite", "rows", "addends") if key in entry},
        argument if entry.get("use") else None,
    )
    full = name if argument is None else f"{name}-{argument}"
    arguments = () if argument is None else (argument,)
    return Case(full, script, arguments, truth, tuple(entry["causes"]), tuple(entry["reports"]))


def _becomes(text: str, entry: Mapping[str, Any] | None, argument: str | None) -> Becomes | None:
    if entry is None:
        return None
    line = _marked(text, "becomes", argument) if entry.get("line", True) else None
    return Becomes(tuple(entry["operations"]), entry["module"], line)


def _marked(text: str, mark: str, argument: str | None) -> int:
    """The number of the one line that ends in `# mark` or in `# mark: argument`."""
    ends = (f"# {mark}", f"# {mark}: {argument}")
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if line.endswith(ends))
    return line
