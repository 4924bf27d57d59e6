"""Cells of a matrix: expansion, exclusion, ids, folder names and the order of a run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanbisect.matrix import Cell, Factor, Matrix, excluded, expand, is_excluded, run_order, slug

FACTORS = (Factor("attention", ("sdpa", "eager", "flash")), Factor("batch_size", ("1", "8")))


def matrix(*exclude: dict[str, str], **fixed: str) -> Matrix:
    return Matrix("m", "sft", FACTORS, settings=fixed, exclude=exclude)


def test_the_first_factor_changes_slowest_and_numbers_count_from_1() -> None:
    cells = expand(matrix())
    assert [(cell.number, *cell.levels.values()) for cell in cells] == [
        (1, "sdpa", "1"),
        (2, "sdpa", "8"),
        (3, "eager", "1"),
        (4, "eager", "8"),
        (5, "flash", "1"),
        (6, "flash", "8"),
    ]
    assert cells[0].levels == matrix().baseline


def test_excluded_cells_have_no_number() -> None:
    some = matrix({"attention": "eager", "batch_size": "8"}, {"attention": "flash"})
    cells = expand(some)
    assert [(cell.number, cell.id) for cell in cells] == [
        (1, "attention=sdpa,batch_size=1"),
        (2, "attention=sdpa,batch_size=8"),
        (3, "attention=eager,batch_size=1"),
    ]
    assert len(list(excluded(some))) == some.combinations - len(cells) == 3


def test_fixed_settings_count_in_rules() -> None:
    rule = {"attention": "flash", "precision": "fp32"}
    assert is_excluded(matrix(rule, precision="fp32"), {"attention": "flash", "batch_size": "1"})
    assert not is_excluded(matrix(rule, precision="bf16"), {"attention": "flash", "batch_size": "1"})
    assert not is_excluded(matrix(rule), {"attention": "flash", "batch_size": "1"})
    assert len(expand(matrix(rule, precision="fp32"))) == 4


def test_factors_are_found_by_name() -> None:
    assert matrix().factor("batch_size") == FACTORS[1]
    assert matrix().factor("precision") is None
    assert FACTORS[0].safe == "sdpa"


def test_an_id_does_not_depend_on_the_order_of_keys() -> None:
    one, other = Cell(1, {"b": "2", "a": "1"}), Cell(7, {"a": "1", "b": "2"})
    assert one.id == other.id == "a=1,b=2"
    assert one.slug == other.slug


def test_the_baseline_runs_first_then_the_likeliest_to_fail() -> None:
    some = matrix()
    order = run_order(some, expand(some), lambda cell: True)
    assert [cell.number for cell in order] == [1, 6, 2, 3, 4, 5]


def test_a_suspect_that_can_not_run_is_passed_over() -> None:
    some = matrix()
    order = run_order(some, expand(some), lambda cell: cell.levels["attention"] != "flash")
    assert [cell.number for cell in order] == [
        1,
        4,
        2,
        3,
        5,
        6,
    ]  # the last level of attention that can run is its second
    assert {cell.number for cell in run_order(some, expand(some), lambda cell: False)} == set(range(1, 7))


def test_an_order_without_baseline_keeps_every_cell() -> None:
    some = matrix({"attention": "sdpa", "batch_size": "1"})
    cells = expand(some)
    assert sorted(cell.number for cell in run_order(some, cells, lambda cell: True)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("text", ["", "===", "a/b\\..", "ÄÖ", "x" * 300, "con", "attention=sdpa:math,batch_size=1"])
def test_a_slug_is_a_safe_folder_name(text: str) -> None:
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?-[0-9a-f]{8}", slug(text))
    assert len(slug(text)) <= 57


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True, max_size=20))
def test_slugs_of_different_texts_differ(texts: list[str]) -> None:
    assert len({slug(text) for text in texts}) == len(texts)


LEVELS = st.lists(st.text("abc123.-", min_size=1, max_size=4), min_size=2, max_size=4, unique=True)


@given(st.dictionaries(st.sampled_from("pqrs"), LEVELS, min_size=1, max_size=3), st.data())
def test_the_run_order_is_a_permutation_and_starts_with_the_baseline(
    levels: dict[str, list[str]], data: st.DataObject
) -> None:
    some = Matrix("m", "sft", tuple(Factor(name, tuple(values)) for name, values in levels.items()))
    cells = expand(some)
    runnable = {cell.number for cell in cells if data.draw(st.booleans())}
    order = run_order(some, cells, lambda cell: cell.number in runnable)
    assert order[0].levels == some.baseline
    assert sorted(cell.number for cell in order) == [cell.number for cell in cells]
    assert len({cell.id for cell in cells}) == len(cells) == some.combinations
