"""Cells by number and by levels, and how many there are, without listing them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanbisect import cells
from nanbisect.cells import Cells
from nanbisect.matrix import Factor, Matrix, expand, is_excluded

LEVELS = {"a": ("0", "1"), "b": ("0", "1", "2"), "c": ("x", "y"), "d": ("0", "1", "2")}
NAMES = (*LEVELS, "fixed")


def matrix_of(*rules: dict[str, str]) -> Matrix:
    """Thirty-six combinations, and a setting that is held constant."""
    factors = tuple(Factor(name, levels) for name, levels in LEVELS.items())
    return Matrix("m", "fake", factors, {"fixed": "1"}, rules)


RULES = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(("0", "1", "2", "x", "y")), min_size=1, max_size=3),
    max_size=5,
)
HELD = st.dictionaries(st.sampled_from(tuple(LEVELS)), st.lists(st.sampled_from("012xy"), unique=True), max_size=3)


@given(rules=RULES, without=RULES, held=HELD)
def test_counting_agrees_with_listing(
    rules: list[dict[str, str]], without: list[dict[str, str]], held: dict[str, list[str]]
) -> None:
    """Whatever the rules exclude, and whatever is asked for."""
    matrix = matrix_of(*rules)
    wider = replace(matrix, exclude=(*rules, *without))
    there = [
        cell
        for cell in expand(matrix)
        if not is_excluded(wider, cell.levels) and all(cell.levels[name] in levels for name, levels in held.items())
    ]
    assert Cells(matrix).count(held, without=without) == len(there)


@pytest.mark.parametrize("listed", [True, False])
@given(rules=RULES)
def test_numbers_and_levels_find_the_same_cell(listed: bool, rules: list[dict[str, str]]) -> None:
    """Also where cells are not listed: there a number is a place in the full product."""
    matrix = matrix_of(*rules)
    space = Cells(matrix)
    space.listed = listed
    every = [dict(zip(LEVELS, row, strict=True)) for row in itertools.product(*LEVELS.values())]
    kept = [levels for levels in every if not is_excluded(matrix, levels)]
    assert [space.has(levels) for levels in every] == [levels in kept for levels in every]
    found = [space.cell(levels) for levels in kept]
    assert [dict(cell.levels) for cell in found] == kept
    assert [space.numbered(cell.number) for cell in found] == found
    numbers = [every.index(levels) + 1 for levels in kept]
    assert [cell.number for cell in found] == (list(range(1, len(kept) + 1)) if listed else numbers)
    assert space.numbered(0) is None
    assert space.numbered(37) is None


def test_a_matrix_of_any_size_is_only_counted() -> None:
    """Sixty factors of three levels, and rules that cross."""
    factors = tuple(Factor(f"f{index}", ("0", "1", "2")) for index in range(60))
    rules = tuple({f"f{index}": "1", f"f{index + 1}": "2"} for index in range(0, 20, 2))
    space = Cells(Matrix("m", "fake", factors, exclude=rules))
    assert not space.listed
    assert space.count() == 8**10 * 3**40
    last = space.cell({factor.name: "2" for factor in factors})
    assert last.number == 3**60
    assert space.numbered(3**60) == last
    pairs = list(space.combinations(("f0", "f1")))
    assert len(pairs) == 8
    assert {"f0": "1", "f1": "2"} not in pairs
    with pytest.raises(ValueError, match="are not listed"):
        _ = space.every
    assert cells.MOST_LISTED == 20_000
