"""The grid by positions: how many levels each factor has, what is excluded, which rows are legal.

Nothing here enumerates the grid. Excluded and blocked combinations are rules; a rule that is part of a row
makes it illegal, or untestable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from nanbisect.matrix import Factor, Matrix
from nanbisect.search.values import Combination, Row

Fixed = dict[int, int]
"""Levels by factor, both by position: a row in the making."""


@dataclass(frozen=True)
class Space:
    """The grid. `exclude` are combinations that the matrix leaves out, `blocked` those this machine can't run."""

    factors: tuple[Factor, ...]
    exclude: tuple[Combination, ...] = ()
    blocked: tuple[Combination, ...] = ()

    @classmethod
    def of(cls, matrix: Matrix, blocked: Iterable[Mapping[str, str]] = ()) -> Space:
        """The matrix's grid; `blocked` are levels by name that can't be run together."""
        bare = cls(matrix.factors)
        excluded = [bare.rule(rule, matrix.settings) for rule in matrix.exclude]
        barred = [bare.rule(rule, matrix.settings) for rule in blocked]
        return cls(matrix.factors, _kept(excluded), _kept(barred))

    def rule(self, levels: Mapping[str, str], settings: Mapping[str, str]) -> Combination | None:
        """A rule by positions. A fixed setting of the same level says nothing; of another, the rule never matches."""
        position = {factor.name: at for at, factor in enumerate(self.factors)}
        parts = []
        for name, level in levels.items():
            if name in position and level in self.factors[position[name]].levels:
                parts.append((position[name], self.factors[position[name]].levels.index(level)))
            elif name in position or settings.get(name) != level:
                return None
        return tuple(sorted(parts))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of levels of every factor."""
        return tuple(len(factor.levels) for factor in self.factors)

    @property
    def baseline(self) -> Row:
        """All first levels."""
        return (0,) * len(self.factors)

    @property
    def product(self) -> int:
        """The number of rows, legal or not."""
        return math.prod(self.sizes)

    @cached_property
    def rules(self) -> tuple[Combination, ...]:
        """What a row that can be run must not hold."""
        return (*self.exclude, *self.blocked)

    def row(self, levels: Mapping[str, str]) -> Row:
        """A cell's levels by position."""
        return tuple(factor.levels.index(levels[factor.name]) for factor in self.factors)

    def levels(self, row: Row) -> dict[str, str]:
        """A row's levels by name."""
        return {factor.name: factor.levels[at] for factor, at in zip(self.factors, row, strict=True)}

    def named(self, combination: Combination) -> dict[str, str]:
        """A combination's levels by name."""
        return {self.factors[f].name: self.factors[f].levels[at] for f, at in combination}

    def words(self, combination: Combination) -> str:
        """`attention=eager with batch_size=8`."""
        return " with ".join(f"{name}={level}" for name, level in self.named(combination).items())

    def legal(self, row: Row) -> bool:
        """Whether the matrix has it."""
        return not any(holds(row, rule) for rule in self.exclude)

    def runnable(self, row: Row) -> bool:
        """Whether the matrix has it and this machine may be able to run it."""
        return not any(holds(row, rule) for rule in self.rules)

    def count(self, combination: Combination = ()) -> int:
        """How many cells of the matrix hold it."""
        return _count(self.sizes, dict(combination), self.exclude)

    def completion(
        self, combination: Combination, without: Sequence[Combination], like: Row | None = None
    ) -> Row | None:
        """A row that holds `combination` and none of `without`, otherwise as near to `like` (the baseline) as is
        easily had; None if there is none."""
        like = like or self.baseline
        found = _completion(self.sizes, dict(combination), without, like)
        return None if found is None else tuple(found.get(f, at) for f, at in enumerate(like))


def holds(row: Row, combination: Combination) -> bool:
    """Whether the row has all these levels."""
    for f, at in combination:  # noqa: SIM110 - half the time of all(), and it is asked often
        if row[f] != at:
            return False
    return True


def within(part: Combination, whole: Combination) -> bool:
    """Whether `part` is a part of `whole`, or the same."""
    return {*part} <= {*whole}


def _kept(rules: Iterable[Combination | None]) -> tuple[Combination, ...]:
    return tuple(dict.fromkeys(rule for rule in rules if rule is not None))


def _open(rules: Sequence[Combination], fixed: Fixed) -> Iterator[Combination]:
    """What is left of each rule that may still match: its parts that are not fixed yet."""
    for rule in rules:
        if all(fixed.get(f, at) == at for f, at in rule):
            yield tuple((f, at) for f, at in rule if f not in fixed)


def _count(sizes: Sequence[int], fixed: Fixed, rules: Sequence[Combination]) -> int:
    left = sorted(_open(rules, fixed), key=len)
    if not left:
        return math.prod(size for f, size in enumerate(sizes) if f not in fixed)
    if not left[0]:
        return 0
    f = left[0][0][0]
    return sum(_count(sizes, {**fixed, f: at}, rules) for at in range(sizes[f]))


def _completion(sizes: Sequence[int], fixed: Fixed, rules: Sequence[Combination], like: Row) -> Fixed | None:
    """Levels that keep every rule from matching. It breaks the shortest open rule first, and turns back."""
    left = sorted(_open(rules, fixed), key=len)
    if left and not left[0]:
        return None
    if not any(holds(like, rule) for rule in left):
        return fixed
    f = left[0][0][0]
    for step in range(sizes[f]):
        found = _completion(sizes, {**fixed, f: (like[f] + step) % sizes[f]}, left, like)
        if found is not None:
            return found
    return None
