"""All cells of a matrix, by number, by levels or in order, without listing them where they are too many.

Up to `MOST_LISTED` combinations a cell's number counts the cells that are not excluded. Beyond that nothing
is listed: a cell's number is its place in the full product, counted from 1, and excluded combinations
keep theirs there. Counting is by cases over the factors that the rules of `exclude` name, so that it is
exact and quick for any size.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from nanbisect.matrix import Cell, Factor, Matrix, expand, is_excluded

MOST_LISTED = 20_000
"""The largest full product that is ever written out."""

Levels = Mapping[str, str]
Held = Mapping[str, Sequence[str]]
"""A combination of levels, of which each factor may have several."""


class Cells:
    """The cells of one matrix."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.listed = matrix.combinations <= MOST_LISTED

    def __len__(self) -> int:
        return self.count()

    @cached_property
    def every(self) -> tuple[Cell, ...]:
        """All cells by number. Raises ValueError where they are too many to be listed."""
        if not self.listed:
            raise ValueError(f"{self.matrix.combinations:,} combinations are not listed")
        return expand(self.matrix)

    def cell(self, levels: Levels) -> Cell:
        """The cell of these levels, one of each factor, in the matrix's order. Raises KeyError for one that is none."""
        ordered = {factor.name: levels[factor.name] for factor in self.matrix.factors}
        if self.listed:
            return self._by_id[Cell(0, ordered).id]
        if is_excluded(self.matrix, ordered):
            raise KeyError(Cell(0, ordered).id)
        return Cell(self._place(ordered) + 1, ordered)

    def numbered(self, number: int) -> Cell | None:
        """The cell of that number; None where there is none."""
        if self.listed:
            return self.every[number - 1] if 0 < number <= len(self.every) else None
        if not 0 < number <= self.matrix.combinations:
            return None
        levels, rest = {}, number - 1
        for factor in reversed(self.matrix.factors):
            rest, index = divmod(rest, len(factor.levels))
            levels[factor.name] = factor.levels[index]
        ordered = {factor.name: levels[factor.name] for factor in self.matrix.factors}
        return None if is_excluded(self.matrix, ordered) else Cell(number, ordered)

    def has(self, levels: Levels) -> bool:
        """Whether a cell has these levels, one of each factor: nothing unknown, and not excluded."""
        known = {factor.name: factor.levels for factor in self.matrix.factors}
        right = levels.keys() == known.keys() and all(level in known[name] for name, level in levels.items())
        return right and not is_excluded(self.matrix, levels)

    def count(self, held: Held | None = None, *, without: Sequence[Levels] = ()) -> int:
        """How many cells hold a combination, but for those that hold one of `without` too."""
        held = held or {}
        factors = tuple(
            Factor(factor.name, tuple(level for level in factor.levels if level in held.get(factor.name, (level,))))
            for factor in self.matrix.factors
        )
        return _left(factors, tuple(self._rules((*self.matrix.exclude, *without))))

    def combinations(self, names: Sequence[str]) -> Iterator[Levels]:
        """The combinations of the levels of these factors that some cell has."""
        chosen = [factor for factor in self.matrix.factors if factor.name in names]
        for row in itertools.product(*(factor.levels for factor in chosen)):
            levels = {factor.name: level for factor, level in zip(chosen, row, strict=True)}
            if self.count({name: (level,) for name, level in levels.items()}):
                yield levels

    @cached_property
    def _by_id(self) -> Mapping[str, Cell]:
        return {cell.id: cell for cell in self.every}

    def _place(self, levels: Levels) -> int:
        place = 0
        for factor in self.matrix.factors:
            place = place * len(factor.levels) + factor.levels.index(levels[factor.name])
        return place

    def _rules(self, rules: Sequence[Levels]) -> Iterator[Levels]:
        """The rules as they concern the factors; one that speaks of another fixed level never matches."""
        names = {factor.name for factor in self.matrix.factors}
        for rule in rules:
            fixed = {name: level for name, level in rule.items() if name not in names}
            if fixed.items() <= self.matrix.settings.items():
                yield {name: level for name, level in rule.items() if name in names}


def _left(factors: tuple[Factor, ...], rules: tuple[Levels, ...]) -> int:
    """The combinations that no rule matches: by cases over the factor that most rules name."""
    if not all(rules):  # a rule without any condition left matches everything
        return 0
    if not rules:
        return math.prod(len(factor.levels) for factor in factors)
    name = Counter(name for rule in rules for name in rule).most_common(1)[0][0]
    factor = next(factor for factor in factors if factor.name == name)
    rest = tuple(other for other in factors if other is not factor)
    named = {rule[name] for rule in rules if name in rule}
    silent = tuple(rule for rule in rules if name not in rule)
    total = sum(level not in named for level in factor.levels) * _left(rest, silent)
    for level in factor.levels:
        if level in named:
            kept = [rule for rule in rules if rule.get(name, level) == level]
            total += _left(rest, tuple({key: value for key, value in rule.items() if key != name} for rule in kept))
    return total
