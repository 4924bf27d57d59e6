"""The experiment as values: Setting, Factor, Matrix, Cell; expansion and cell ids.

Levels are text everywhere. A level keeps the spelling of the matrix file, so that ids, reports and
`--set` agree; the trainer that owns a setting turns the text into a value with `Setting.parse`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One named knob of a trainer.

    `parse` takes a level's text and returns the value, or raises ValueError with the mend.
    `neutral` marks settings that must not change the mathematics of training, so that finite cells
    that differ only there can be compared.
    """

    name: str
    summary: str
    parse: Callable[[str], Any]
    default: str
    choices: tuple[str, ...] = ()
    neutral: bool = False

    def takes(self, level: str) -> bool:
        """Whether it has that level."""
        try:
            self.parse(level)
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class Factor:
    """A setting under suspicion. The first level is the safe one."""

    name: str
    levels: tuple[str, ...]

    @property
    def safe(self) -> str:
        """The level of the baseline."""
        return self.levels[0]


@dataclass(frozen=True)
class Cell:
    """One combination of levels. `number` counts from 1 in the order of the matrix's product."""

    number: int
    levels: Mapping[str, str]

    @cached_property
    def id(self) -> str:
        """`attention=eager,batch_size=8`: readable, and the same under any order of the keys."""
        return ",".join(f"{name}={level}" for name, level in sorted(self.levels.items()))

    @property
    def slug(self) -> str:
        """A folder name safe on any file system: a short readable part and 8 hex digits of the id."""
        return slug(self.id)


@dataclass(frozen=True)
class Expansion:
    """What a level becomes in a command: words, and keys (`optimizer.lr`) of its configuration file.

    Texts may hold placeholders such as `{value}`; see `matrix_command`.
    """

    words: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


Flags = Mapping[str, Mapping[str, Expansion]]
"""Setting -> level -> what it becomes; the level `*` stands for all that are not named."""

ANY_LEVEL = "*"


@dataclass(frozen=True)
class Matrix:
    """The experiment file as read. Relative paths are relative to `folder`."""

    name: str
    trainer: str
    factors: tuple[Factor, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[Mapping[str, str], ...] = ()
    recipe: str | None = None
    model: str | None = None
    data: str | None = None
    steps: int = 3
    records: tuple[str, ...] = ()
    skip_records: int = 0
    repeat: int = 1
    timeout: float = 600.0
    device: str = "auto"
    gpus_per_cell: int | None = 1
    trust_remote_code: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "."
    command: tuple[str, ...] = ()
    flags: Flags = field(default_factory=dict)
    folder: str = "."

    @property
    def baseline(self) -> Mapping[str, str]:
        """All first levels."""
        return {factor.name: factor.safe for factor in self.factors}

    def factor(self, name: str) -> Factor | None:
        """The factor of that name, if the setting is one."""
        return next((factor for factor in self.factors if factor.name == name), None)

    @property
    def combinations(self) -> int:
        """The size of the full product, exclusions not taken off."""
        return math.prod(len(factor.levels) for factor in self.factors)


@dataclass(frozen=True)
class Vocabulary:
    """What a trainer understands; `matrix_file` checks a matrix against it.

    `check` looks at a whole, otherwise valid matrix and returns what this trainer can't do with it,
    as (path such as `factors.channel_weights`, what, mend). `commands`: the matrix may have a `command` and
    `flags`, and with them further settings.
    """

    settings: Mapping[str, Setting]
    recipes: tuple[str, ...] = ()
    commands: bool = False
    check: Callable[[Matrix], Sequence[tuple[str, str, str]]] = lambda matrix: ()


def expand(matrix: Matrix) -> tuple[Cell, ...]:
    """All cells but the excluded, first factor slowest. Numbers skip nothing: excluded cells have none."""
    names = [factor.name for factor in matrix.factors]
    product = itertools.product(*(factor.levels for factor in matrix.factors))
    kept = (
        levels for levels in (dict(zip(names, row, strict=True)) for row in product) if not is_excluded(matrix, levels)
    )
    return tuple(Cell(number, levels) for number, levels in enumerate(kept, start=1))


def excluded(matrix: Matrix) -> Iterator[Mapping[str, str]]:
    """The combinations that `exclude` takes out."""
    names = [factor.name for factor in matrix.factors]
    for row in itertools.product(*(factor.levels for factor in matrix.factors)):
        levels = dict(zip(names, row, strict=True))
        if is_excluded(matrix, levels):
            yield levels


def is_excluded(matrix: Matrix, levels: Mapping[str, str]) -> bool:
    """Whether any rule of `exclude` matches this combination; fixed settings count as levels too."""
    full = {**matrix.settings, **levels}
    return any(all(full.get(name) == level for name, level in rule.items()) for rule in matrix.exclude)


def run_order(matrix: Matrix, cells: tuple[Cell, ...], runnable: Callable[[Cell], bool]) -> tuple[Cell, ...]:
    """Baseline, then the cell likeliest to fail, then the rest.

    That cell has the last level of every factor, as far as this machine can run them.
    """
    baseline = [cell for cell in cells if cell.levels == matrix.baseline]
    rest = [cell for cell in cells if cell.levels != matrix.baseline]
    suspects = [cell for cell in rest if runnable(cell)]
    there = {(name, level) for cell in suspects for name, level in cell.levels.items()}
    last = {f.name: [level for level in f.levels if (f.name, level) in there][-1:] for f in matrix.factors}

    def last_levels(cell: Cell) -> tuple[int, int]:
        return sum([cell.levels[name]] == level for name, level in last.items()), -cell.number

    first = [max(suspects, key=last_levels)] if suspects else []
    return (*baseline, *first, *(cell for cell in rest if cell not in first))


def slug(text: str) -> str:
    """A short, safe folder name for any text, unique by a hash of the whole."""
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48].strip("-") or "cell"
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
