"""Causes, cautions and divergences: examples, properties over planted truths, and a simulation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanbisect.attribution import Attribution, Cause, Caution, Finding, Standing, attribute
from nanbisect.matrix import Cell, Factor, Matrix, expand
from nanbisect.outcome import CellResult, Note, Outcome, Status

Levels = Mapping[str, str]

FINITE = Outcome(Status.FINITE, "3 steps, all finite")
NONFINITE = Outcome(Status.NONFINITE, "NaN in a gradient")
UNSUPPORTED = Outcome(Status.UNSUPPORTED, "flash_attn is not installed")
OOM = Outcome(Status.OUT_OF_MEMORY, "CUDA out of memory")

DEMO = (
    Factor("gradient_checkpointing", ("off", "on")),
    Factor("batch_size", ("1", "2", "8")),
    Factor("channel_weights", ("1,8", "1,32")),
    Factor("attention", ("sdpa", "eager", "flash")),
)
NEUTRAL = frozenset({"gradient_checkpointing", "attention", "gradient_accumulation"})


def matrix(**levels: str) -> tuple[Factor, ...]:
    """`a="01", b="012"`: a factor a name, a level a character."""
    return tuple(Factor(name, tuple(text)) for name, text in levels.items())


def cells(factors: Sequence[Factor], exclude: tuple[Levels, ...] = ()) -> tuple[Cell, ...]:
    return expand(Matrix("m", "sft", tuple(factors), exclude=exclude))


def ran(factors: Sequence[Factor], judge: Callable[[Levels], Outcome | None]) -> tuple[CellResult, ...]:
    """Every cell, with the one attempt that `judge` gives it, or none."""
    outcomes = [(cell, judge(cell.levels)) for cell in cells(factors)]
    return tuple(CellResult(cell, (outcome,) if outcome else ()) for cell, outcome in outcomes)


def fails(when: bool) -> Outcome:
    return NONFINITE if when else FINITE


def holds(levels: Levels, combination: Levels) -> bool:
    return all(levels[name] == level for name, level in combination.items())


def matches(cause: Mapping[str, tuple[str, ...]], levels: Levels) -> bool:
    return all(levels[name] in values for name, values in cause.items())


def table(factors: Sequence[Factor], rows: Mapping[str, str]) -> Attribution:
    """`{"00": ".", "01": "x"}`: `.` finite, `x` non-finite, `o` out of memory; others were not run."""
    outcomes = {".": FINITE, "x": NONFINITE, "o": OOM, " ": None}
    return attribute(factors, ran(factors, lambda levels: outcomes[rows.get("".join(levels.values()), " ")]))


def levels_of(causes: Sequence[Cause]) -> list[dict[str, str]]:
    """`{"a": "1", "b": "12"}`: the levels of a part run together."""
    return [{name: "".join(values) for name, values in cause.levels.items()} for cause in causes]


def caution(attribution: Attribution, code: str) -> Caution:
    """The only caution of that code."""
    (found,) = [item for item in attribution.cautions if item.code == code]
    return found


def codes(attribution: Attribution) -> list[str]:
    return [item.code for item in attribution.cautions]


# The demo


def demo(levels: Levels) -> Outcome:
    if levels["attention"] == "flash":
        return UNSUPPORTED
    return fails(levels["attention"] == "eager" and levels["batch_size"] != "1")


def test_the_demo_has_one_proved_cause() -> None:
    found = attribute(DEMO, ran(DEMO, demo), neutral_settings=NEUTRAL)
    (cause,) = found.causes
    assert found.finding is Finding.CAUSE
    assert cause.levels == {"batch_size": ("2", "8"), "attention": ("eager",)}
    assert cause.standing is Standing.PROVED
    assert (cause.matching, cause.failed, cause.untested) == (8, 8, 0)
    assert cause.needed == {
        "attention": {"sdpa": "finite", "flash": "unsupported"},
        "batch_size": {"1": "finite"},
    }
    assert found.neutral == ("gradient_checkpointing", "channel_weights")
    assert cause.unseen == {} and cause.alternatives == () and cause.deciding == ()


def test_witnesses_are_finite_and_lack_exactly_one_part() -> None:
    (cause,) = attribute(DEMO, ran(DEMO, demo)).causes
    by_number = {cell.number: cell.levels for cell in cells(DEMO)}
    for number in cause.witnesses:
        lacking = [name for name, part in cause.levels.items() if by_number[number][name] not in part]
        assert len(lacking) == 1 and demo(by_number[number]) is FINITE
    assert len(cause.witnesses) == 4 + 8


def test_the_demo_says_what_was_not_judged_and_why() -> None:
    found = attribute(DEMO, ran(DEMO, demo))
    assert caution(found, "not_judged").text == (
        "12 of 36 cells were not judged: unsupported. All 12 unsupported cells hold attention=flash."
    )
    assert caution(found, "single_attempt").text.startswith("Every judged cell rests on one attempt")
    assert codes(found) == ["not_judged", "single_attempt"]


# Findings without a cause


@pytest.mark.parametrize(
    ("rows", "finding"),
    [
        ({}, Finding.NOTHING_JUDGED),
        ({"00": "o", "01": "o"}, Finding.NOTHING_JUDGED),
        ({"00": ".", "11": "."}, Finding.NOTHING_FAILED),
        ({"00": "x", "01": "x", "10": "x", "11": "x"}, Finding.EVERYTHING_FAILED),
        ({"11": "x"}, Finding.EVERYTHING_FAILED),
    ],
)
def test_nothing_to_compare_gives_no_cause(rows: Mapping[str, str], finding: Finding) -> None:
    found = table(matrix(a="01", b="01"), rows)
    assert (found.finding, found.causes, found.neutral) == (finding, (), ())


def test_no_cells_at_all() -> None:
    assert attribute((), ()).finding is Finding.NOTHING_JUDGED


# Causes


def everywhere(factors: Sequence[Factor], *truth: Levels) -> Attribution:
    return attribute(factors, ran(factors, lambda levels: fails(any(holds(levels, part) for part in truth))))


def test_two_causes_at_once() -> None:
    found = everywhere(matrix(a="01", b="012", c="01"), {"a": "1"}, {"b": "2", "c": "1"})
    assert levels_of(found.causes) == [{"a": "1"}, {"b": "2", "c": "1"}]
    assert {cause.standing for cause in found.causes} == {Standing.PROVED}
    assert found.causes[1].needed == {"b": {"0": "mixed", "1": "mixed"}, "c": {"0": "mixed"}}


def test_merging_goes_on_over_several_factors() -> None:
    truth = [{"a": a, "b": b} for a in "12" for b in "12"]
    (cause,) = everywhere(matrix(a="012", b="012", c="01"), *truth).causes
    assert cause.levels == {"a": ("1", "2"), "b": ("1", "2")}
    assert (cause.standing, cause.matching) == (Standing.PROVED, 8)


def test_a_part_never_covers_all_judged_levels() -> None:
    (cause,) = table(matrix(a="01", b="012"), {"00": ".", "01": ".", "10": "x", "11": "x", "12": "x"}).causes
    assert cause.levels == {"a": ("1",)}


def test_a_combination_that_others_already_explain_is_dropped() -> None:
    found = everywhere(matrix(a="01", b="01", c="01"), {"a": "0", "b": "1"}, {"a": "1", "c": "1"})
    assert levels_of(found.causes) == [{"a": "0", "b": "1"}, {"a": "1", "c": "1"}]


def test_when_none_is_essential_none_too_many_is_kept() -> None:
    """Six pairs explain six of the eight cells in a ring."""
    factors = matrix(a="01", b="01", c="01")
    results = ran(factors, lambda levels: fails(len(set(levels.values())) > 1))
    found = attribute(factors, results)
    assert {cause.standing for cause in found.causes} == {Standing.PROVED}
    failing = [result.cell.levels for result in results if result.status is Status.NONFINITE]
    for size, explained in ((len(found.causes), True), (len(found.causes) - 1, False)):
        for few in itertools.combinations(found.causes, size):
            everything = all(any(matches(cause.levels, levels) for cause in few) for levels in failing)
            assert everything is explained


def test_a_cell_out_of_memory_leaves_a_cause_supported() -> None:
    rows = {"000": ".", "001": ".", "010": ".", "011": ".", "100": "x", "101": "x", "110": "x", "111": "o"}
    found = table(matrix(a="01", b="01", c="01"), rows)
    (cause,) = found.causes
    assert (cause.levels, cause.standing) == ({"a": ("1",)}, Standing.SUPPORTED)
    assert (cause.matching, cause.failed, cause.untested) == (4, 3, 1)
    assert found.neutral == ("b", "c")


def test_a_level_never_tried_leaves_the_cause_open_and_an_impossible_one_does_not() -> None:
    factors = matrix(a="01", b="01")
    never_tried = table(factors, {"00": ".", "10": "x"})
    assert never_tried.finding is Finding.UNDECIDED
    impossible = table(factors, {"00": ".", "10": "x", "01": "o", "11": "o"})
    (cause,) = impossible.causes
    assert (cause.standing, cause.unseen) == (Standing.SUPPORTED, {"b": ("1",)})
    assert caution(impossible, "never_seen").text == "a=1 was never judged together with b=1."


def test_failures_that_another_cause_explains_do_not_speak_for_a_cause() -> None:
    """Of a=1 with c=1 only cells with b=1 were judged, which fail by themselves."""
    factors = matrix(a="01", b="01", c="01")
    rows = {"000": ".", "001": ".", "010": "x", "011": "x", "100": "x", "101": "o", "110": "x", "111": "x"}
    found = table(factors, rows)
    assert levels_of(found.causes) == [{"b": "1"}, {"a": "1"}]
    assert [cause.standing for cause in found.causes] == [Standing.PROVED, Standing.NOT_TOLD_APART]
    assert found.causes[1].alternatives == ({"a": ("1",), "c": ("0",)},)
    assert found.causes[1].deciding == (6,)


def test_one_failing_cell_tells_nothing_apart() -> None:
    found = table(matrix(a="01", b="01"), {"00": ".", "11": "x"})
    assert found.finding is Finding.UNDECIDED
    assert levels_of(found.causes) == [{"a": "1"}, {"b": "1"}]
    first, second = found.causes
    assert {"b": ("1",)} in first.alternatives and {"a": ("1",)} in second.alternatives
    assert first.deciding == second.deciding == (2, 3)
    assert found.neutral == ()


def test_a_level_missing_beside_a_cause_is_an_alternative() -> None:
    """eager failed with checkpointing off only; with it on, eager was never judged."""
    rows = {"00": ".", "01": ".", "10": "x", "11": "o", "20": ".", "21": "."}
    found = table(matrix(attention="012", checkpointing="01"), rows)
    (cause,) = found.causes
    assert (found.finding, cause.standing) == (Finding.UNDECIDED, Standing.NOT_TOLD_APART)
    assert cause.levels == {"attention": ("1",)}
    assert cause.alternatives == ({"attention": ("1",), "checkpointing": ("0",)},)
    assert cause.deciding == (4,)
    assert found.neutral == ()


def test_too_broad_ones_merge_with_each_other_but_not_with_a_cause() -> None:
    rows = {f"{a}{b}": "." for a in "05" for b in "01"}
    rows |= {"10": "x", "11": "x", "20": "x", "21": "x", "30": "x", "31": "o", "40": "x", "41": "o"}
    found = table(matrix(a="012345", b="01"), rows)
    assert levels_of(found.causes) == [{"a": "12"}, {"a": "34"}]
    assert [cause.standing for cause in found.causes] == [Standing.PROVED, Standing.NOT_TOLD_APART]
    assert found.causes[1].deciding == (8, 10)


def test_a_diagonal_is_not_enough_to_support_a_cause() -> None:
    """Each level of b and c failed with a=1, but not half of its cells, and not each pair."""
    rows = {"000": ".", "011": ".", "001": ".", "010": ".", "100": "x", "111": "x"}
    found = table(matrix(a="01", b="01", c="01"), rows)
    (cause,) = found.causes
    assert (cause.levels, cause.standing) == ({"a": ("1",)}, Standing.NOT_TOLD_APART)
    assert cause.alternatives == ({"a": ("1",), "b": ("1",)}, {"a": ("1",), "c": ("0",)})
    assert cause.deciding == (6,)


def test_among_many_cells_every_pair_seen_is_enough() -> None:
    """4096 cells, 80 judged: combinations of many parts compete for each failure, in vain."""
    factors = tuple(Factor(f"f{number}", ("0", "1")) for number in range(12))
    draw = random.Random(0)
    every = cells(factors)
    chosen = {cell.number for cell in draw.sample(every, 80)}
    chosen |= {cell.number for cell in draw.sample([c for c in every if c.levels["f3"] == "1"], 20)}
    results = [CellResult(cell, (fails(cell.levels["f3"] == "1"),) if cell.number in chosen else ()) for cell in every]
    found = attribute(factors, results)
    assert levels_of(found.causes) == [{"f3": "1"}]
    assert found.causes[0].standing is Standing.SUPPORTED


def test_a_long_list_of_combinations_is_cut_and_says_so() -> None:
    factors = tuple(Factor(f"f{number}", ("0", "1", "2")) for number in range(8))
    draw = random.Random(0)
    chosen = {cell.number for cell in draw.sample(cells(factors), 100)}
    results = [
        CellResult(cell, (fails(cell.levels["f0"] == cell.levels["f1"]),) if cell.number in chosen else ())
        for cell in cells(factors)
    ]
    found = attribute(factors, results)
    assert found.finding is Finding.UNDECIDED
    assert "further combinations explain the same failures" in caution(found, "more_combinations").text
    for result in results:
        if result.status is Status.NONFINITE:
            assert any(matches(cause.levels, result.cell.levels) for cause in found.causes)


def test_needed_names_what_was_never_run() -> None:
    rows = {"00": ".", "01": "x", "02": "o"}
    (cause,) = table(matrix(a="01", b="0123"), rows).causes
    assert cause.needed == {"b": {"0": "finite", "2": "out_of_memory", "3": "not_run"}}


def test_excluded_cells_are_no_gap() -> None:
    factors = matrix(a="01", b="01")
    kept = cells(factors, exclude=({"a": "1", "b": "1"},))
    found = attribute(factors, [CellResult(cell, (fails(cell.levels["a"] == "1"),)) for cell in kept])
    (cause,) = found.causes
    assert (cause.levels, cause.standing, cause.matching) == ({"a": ("1",)}, Standing.PROVED, 1)
    assert cause.unseen == {}


def test_a_factor_is_neutral_only_if_its_change_was_seen_among_failures() -> None:
    rows = {"000": ".", "001": ".", "010": ".", "011": ".", "100": "x", "101": "o", "110": "o", "111": "x"}
    found = table(matrix(a="01", b="01", c="01"), rows)
    assert "b" not in found.neutral and "c" not in found.neutral


# Cautions


def test_baseline_cautions() -> None:
    factors = matrix(a="01", b="01")
    finite = {"00": ".", "01": ".", "10": ".", "11": "x"}
    assert not {"baseline_not_finite", "baseline_not_judged"} & set(codes(table(factors, finite)))
    assert "(cell 1" in caution(table(factors, {**finite, "00": "x"}), "baseline_not_finite").text
    lost = caution(table(factors, {**finite, "00": "o"}), "baseline_not_judged")
    assert "was not judged (out of memory)" in lost.text
    assert "was not judged (not run)" in caution(table(factors, {"11": "x"}), "baseline_not_judged").text
    kept = [CellResult(cell, (FINITE,)) for cell in cells(factors)[1:]]
    assert "is not in the matrix" in caution(attribute(factors, kept), "baseline_not_judged").text


def test_cells_not_judged_and_not_run() -> None:
    found = table(matrix(a="01", b="012"), {"00": ".", "01": "x", "12": "o"})
    assert caution(found, "not_judged").text == "1 of 6 cells was not judged: out of memory. See cell 6."
    assert caution(found, "not_run").text == "3 of 6 cells were not run (cells 3, 4 and 5)."


def test_attempts_that_disagree() -> None:
    factors = matrix(a="01", b="01")
    results = [CellResult(cell, (FINITE, FINITE)) for cell in cells(factors)]
    assert codes(attribute(factors, results)) == []
    results[3] = replace(results[3], attempts=(FINITE, NONFINITE))
    results[2] = replace(results[2], attempts=(OOM, FINITE))
    found = attribute(factors, results)
    assert caution(found, "attempts_disagree").text == (
        "Attempts disagree: cell 4 was finite in one attempt and non-finite in another. They count as non-finite."
    )
    assert caution(found, "single_attempt").text.startswith("1 of 4 judged cells rests on one attempt")
    assert levels_of(found.causes) == [{"a": "1", "b": "1"}]


def test_doubts_become_cautions_by_code() -> None:
    doubtful = replace(FINITE, doubts=(Note("different_records", "it saw 3 of 8 records."),))
    factors = matrix(a="01", b="01")
    results = ran(factors, lambda levels: doubtful if levels["a"] == "1" else FINITE)
    assert caution(attribute(factors, results), "different_records").text == (
        "In 2 cells (3 and 4): it saw 3 of 8 records."
    )


# Divergences, and bits that are too much alike


def step(loss: float, norm: float = 2.0, **extra: Any) -> Outcome:
    """A finite outcome with a first step; `first_gradients` and `seed` by name, the rest is resolved."""
    fields = {name: extra.pop(name) for name in ("first_gradients", "seed") if name in extra}
    return replace(FINITE, loss=(loss,), grad_norm=(norm,), resolved={"precision": "fp32", **extra}, **fields)


def test_identical_bits_say_that_a_setting_may_not_have_arrived() -> None:
    factors = (Factor("loss_reduction", ("a", "b")), Factor("channel_weights", ("1,8", "1,32")))
    results = ran(factors, lambda levels: step(1.5 if levels["channel_weights"] == "1,8" else 2.5))
    found = attribute(factors, results, neutral_settings=NEUTRAL)
    assert caution(found, "identical_bits").text.startswith("loss_reduction=a and loss_reduction=b gave bit-identical")
    assert "in 2 pairs" in caution(found, "identical_bits").text


@pytest.mark.parametrize("name", ["attention", "gradient_checkpointing", "learning_rate"])
def test_identical_bits_are_no_wonder_for_some_settings(name: str) -> None:
    factors = (Factor(name, ("one", "two")),)
    found = attribute(factors, ran(factors, lambda levels: step(1.0)), neutral_settings=frozenset({"attention"}))
    assert "identical_bits" not in codes(found)


def test_identical_bits_need_a_norm_and_every_pair() -> None:
    factors = matrix(a="01", b="01")
    blind = ran(factors, lambda levels: replace(FINITE, loss=(1.0,)))
    assert "identical_bits" not in codes(attribute(factors, blind))
    differs_once = ran(factors, lambda levels: step(2.0 if levels == {"a": "1", "b": "1"} else 1.0))
    assert "identical_bits" not in codes(attribute(factors, differs_once))


def test_a_setting_that_brings_the_nan_has_reached_the_training() -> None:
    """However alike its finite cells are."""
    factors = matrix(a="01", b="01")
    results = ran(factors, lambda levels: NONFINITE if levels == {"a": "1", "b": "1"} else step(1.0))
    assert "identical_bits" not in codes(attribute(factors, results))
    idle = ran(factors, lambda levels: NONFINITE if levels["a"] == "1" else step(1.0))
    assert caution(attribute(factors, idle), "identical_bits").text.startswith("b=0 and b=1 gave")


ATTENTION = (Factor("attention", ("sdpa", "eager")), Factor("channel_weights", ("1,8", "1,32")))


def test_a_kernel_that_changes_the_loss_is_a_divergence() -> None:
    results = ran(ATTENTION, lambda levels: step(1.1 if levels["attention"] == "eager" else 1.0))
    found = attribute(ATTENTION, results, neutral_settings=NEUTRAL)
    assert found.compared == 2
    assert [moved.cells for moved in found.divergences] == [(1, 3), (2, 4)]
    first = found.divergences[0]
    assert (first.settings, first.quantity, first.values) == (("attention",), "loss", (1.0, 1.1))
    assert first.relative == pytest.approx(0.1 / 1.1) and first.tolerance == 1e-4


def test_a_setting_that_may_change_the_loss_is_not_compared() -> None:
    results = ran(ATTENTION, lambda levels: step(1.1 if levels["attention"] == "eager" else 1.0))
    assert attribute(ATTENTION, results).compared == 0


def test_the_loosest_precision_of_a_pair_counts() -> None:
    def judge(levels: Levels) -> Outcome:
        eager = levels["attention"] == "eager"
        return step(1.01 if eager else 1.0, precision="bf16" if eager else "fp32")

    found = attribute(ATTENTION, ran(ATTENTION, judge), neutral_settings=NEUTRAL)
    assert (found.compared, found.divergences) == (2, ())


def test_a_command_seen_to_compute_in_float32_on_a_cpu_is_held_to_it() -> None:
    """No trainer of ours says its precision; a layer that is recomputed with another's weights moves a norm by 10 %."""
    seen = {"precision": None, "device": "cpu", "parameter_dtypes": {"float32": 9}, "casts": 0}

    def moved(**change: Any) -> int:
        judge: Callable[[Levels], Outcome] = lambda levels: step(  # noqa: E731
            1.0, 2.2 if levels["attention"] == "eager" else 2.0, **{**seen, **change}
        )
        return len(attribute(ATTENTION, ran(ATTENTION, judge), neutral_settings=NEUTRAL).divergences)

    assert moved() == 2
    assert moved(device="cuda:0") == moved(casts=None) == moved(parameter_dtypes={}) == 0


@pytest.mark.parametrize(
    "spoil",
    [{"dropout": 0.1}, {"seed": 1}],
    ids=["other random masks", "another seed"],
)
def test_pairs_that_draw_other_numbers_are_not_compared(spoil: Mapping[str, Any]) -> None:
    def judge(levels: Levels) -> Outcome:
        return step(9.0, **spoil) if levels["attention"] == "eager" else step(1.0)

    factors = ATTENTION[:1]
    assert attribute(factors, ran(factors, judge), neutral_settings=NEUTRAL).compared == 0


def test_pairs_without_a_first_step_are_not_compared() -> None:
    factors = ATTENTION[:1]
    results = ran(factors, lambda levels: replace(FINITE, loss=(1.0,)))
    assert attribute(factors, results, neutral_settings=NEUTRAL).compared == 0


def test_only_the_worst_parameter_is_named_and_small_ones_are_noise() -> None:
    gradients = {
        "sdpa": {"a": 1.0, "b": 1.0, "tiny": 1e-9},
        "eager": {"a": 1.1, "b": 1.5, "tiny": 1e-6, "new": 1.0},
    }
    factors = ATTENTION[:1]
    results = ran(factors, lambda levels: step(1.0, first_gradients=gradients[levels["attention"]]))
    (moved,) = attribute(factors, results, neutral_settings=NEUTRAL).divergences
    assert (moved.quantity, moved.values, moved.tolerance) == ("b", (1.0, 1.5), 1e-2)


def test_each_cell_is_compared_with_the_first_of_its_group_only() -> None:
    factors = (Factor("attention", ("sdpa", "eager", "flash", "flex")),)
    found = attribute(factors, ran(factors, lambda levels: step(1.0)), neutral_settings=NEUTRAL)
    assert found.compared == 3


SPLIT = (Factor("batch_size", ("1", "2", "4")), Factor("gradient_accumulation", ("4", "2", "1")))


def split(levels: Levels) -> float:
    return float(levels["batch_size"]) * float(levels["gradient_accumulation"])


def test_splits_of_a_batch_are_compared_if_every_micro_batch_counts_alike() -> None:
    equal = ran(SPLIT, lambda levels: step(split(levels), valid_labels_equal=True))
    found = attribute(SPLIT, equal, neutral_settings=NEUTRAL)
    assert (found.compared, found.divergences) == (2 + 1 + 1, ())  # 4: three cells; 8 and 2: two each
    unequal = ran(SPLIT, lambda levels: step(split(levels)))
    assert attribute(SPLIT, unequal, neutral_settings=NEUTRAL).compared == 0


def test_the_split_is_read_from_what_training_resolved() -> None:
    factors = SPLIT[:1]

    def judge(levels: Levels) -> Outcome:
        size = int(levels["batch_size"])
        return step(float(size), gradient_accumulation=4 // size, valid_labels_equal=True)

    found = attribute(factors, ran(factors, judge), neutral_settings=NEUTRAL)
    assert found.compared == 2
    assert found.divergences[0].settings == ("batch_size", "gradient_accumulation")
    unknown = ran(factors, lambda levels: step(1.0, valid_labels_equal=True))
    assert attribute(factors, unknown, neutral_settings=NEUTRAL).compared == 0


# Properties over planted truths


@dataclass(frozen=True)
class Case:
    """A full truth by cell number, the combinations planted in it, and the numbers left unjudged."""

    factors: tuple[Factor, ...]
    planted: tuple[Levels, ...]
    unjudged: frozenset[int]

    @property
    def cells(self) -> tuple[Cell, ...]:
        return cells(self.factors)

    def bad(self, cell: Cell) -> bool:
        return any(holds(cell.levels, part) for part in self.planted)

    def results(self) -> tuple[CellResult, ...]:
        return tuple(
            CellResult(cell, (OOM if cell.number in self.unjudged else fails(self.bad(cell)),)) for cell in self.cells
        )

    def false(self, cause: Mapping[str, tuple[str, ...]]) -> bool:
        """Whether some cell that holds it is finite in truth."""
        return any(matches(cause, cell.levels) and not self.bad(cell) for cell in self.cells)


SHAPES = ((2, 2), (2, 3), (3, 3), (2, 2, 2), (2, 2, 3), (2, 3, 3), (2, 2, 2, 2), (2, 3, 2, 3), (3, 3, 3))


@st.composite
def cases(draw: st.DrawFn, most_unjudged: float) -> Case:
    """One or two planted combinations of one to three factors; up to a share of the cells not judged."""
    shape = draw(st.sampled_from(SHAPES))
    factors = tuple(Factor("abcd"[i], tuple(map(str, range(size)))) for i, size in enumerate(shape))
    every = [factor.name for factor in factors]
    names = st.lists(st.sampled_from(every), min_size=1, max_size=min(3, len(shape)), unique=True)
    planted = []
    for chosen in draw(st.lists(names, min_size=1, max_size=2)):
        levels = {factor.name: factor.levels for factor in factors if factor.name in chosen}
        planted.append({name: draw(st.sampled_from(options)) for name, options in levels.items()})
    numbers = [cell.number for cell in cells(factors)]
    most = int(most_unjudged * len(numbers))
    unjudged = draw(st.sets(st.sampled_from(numbers), max_size=most)) if most else set()
    return Case(factors, tuple(planted), frozenset(unjudged))


def primes(case: Case) -> list[dict[str, str]]:
    """The truth's minimal failing combinations, by trying them all."""
    options = [[(factor.name, level) for level in (None, *factor.levels)] for factor in case.factors]
    found: list[dict[str, str]] = []
    combinations = [{n: v for n, v in row if v is not None} for row in itertools.product(*options)]
    for combination in sorted(combinations, key=len):
        matching = [cell for cell in case.cells if holds(cell.levels, combination)]
        smaller = any(part.items() <= combination.items() for part in found)
        if not smaller and all(case.bad(cell) for cell in matching):
            found.append(combination)
    return found


def essential(case: Case, combination: Levels) -> bool:
    """Whether it is minimal and alone explains some failing cell."""
    every = primes(case)
    if combination not in every:
        return False
    others = [prime for prime in every if prime != combination]
    explained = [cell for cell in case.cells if holds(cell.levels, combination)]
    return any(not any(holds(cell.levels, prime) for prime in others) for cell in explained)


@settings(max_examples=150, deadline=None)
@given(cases(most_unjudged=0))
def test_with_every_cell_judged_the_truth_is_found_exactly(case: Case) -> None:
    found = attribute(case.factors, case.results())
    assert {cause.standing for cause in found.causes} <= {Standing.PROVED}
    if found.finding is Finding.EVERYTHING_FAILED:
        assert all(case.bad(cell) for cell in case.cells)
        return
    for cell in case.cells:
        assert case.bad(cell) == any(matches(cause.levels, cell.levels) for cause in found.causes)
    for planted in case.planted:
        if essential(case, planted):
            same = [cause.levels for cause in found.causes if cause.levels.keys() == planted.keys()]
            assert any(matches(levels, planted) for levels in same)


@settings(max_examples=200, deadline=None)
@given(cases(most_unjudged=0.3))
def test_with_cells_unjudged_what_is_proved_is_true_and_minimal(case: Case) -> None:
    for cause in attribute(case.factors, case.results()).causes:
        if cause.standing is Standing.PROVED:
            assert not case.false(cause.levels)
            for name in cause.levels:
                assert case.false({other: part for other, part in cause.levels.items() if other != name})


@settings(max_examples=100, deadline=None)
@given(cases(most_unjudged=0), st.data())
def test_taking_away_judged_cells_never_proves_a_false_combination(case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations([cell.number for cell in case.cells]))
    for kept in range(len(order), 0, -max(1, len(order) // 8)):
        fewer = replace(case, unjudged=frozenset(order[kept:]))
        for cause in attribute(fewer.factors, fewer.results()).causes:
            assert cause.standing is not Standing.PROVED or not case.false(cause.levels)


@settings(max_examples=200, deadline=None)
@given(cases(most_unjudged=0.7))
def test_every_failure_is_explained_and_no_finite_cell_is_blamed(case: Case) -> None:
    found = attribute(case.factors, case.results())
    if found.finding not in (Finding.CAUSE, Finding.UNDECIDED):
        assert found.causes == ()
        return
    judged = [cell for cell in case.cells if cell.number not in case.unjudged]
    for cell in judged:
        blamed = any(matches(cause.levels, cell.levels) for cause in found.causes)
        alternative = any(matches(other, cell.levels) for cause in found.causes for other in cause.alternatives)
        assert blamed if case.bad(cell) else not blamed and not alternative


@settings(max_examples=200, deadline=None)
@given(cases(most_unjudged=0.7))
def test_what_is_not_told_apart_says_what_would_decide(case: Case) -> None:
    found = attribute(case.factors, case.results())
    for cause in found.causes:
        open_ = cause.standing is Standing.NOT_TOLD_APART
        assert bool(cause.deciding) == bool(cause.alternatives) == open_
        assert set(cause.deciding) <= case.unjudged
        assert cause.matching == cause.failed + cause.untested
        assert (cause.standing is Standing.PROVED) == (cause.untested == 0)
        assert cause.witnesses
    involved = {name for cause in found.causes for part in (cause.levels, *cause.alternatives) for name in part}
    assert not involved & set(found.neutral)


@settings(max_examples=50, deadline=None)
@given(cases(most_unjudged=0.5), st.randoms(use_true_random=False))
def test_the_order_of_results_does_not_matter(case: Case, draw: random.Random) -> None:
    results = list(case.results())
    expected = attribute(case.factors, results)
    draw.shuffle(results)
    assert attribute(case.factors, results) == expected


# How often a supported cause is wrong


def random_case(draw: random.Random, share: float) -> Case:
    """One to three causes of one to three factors, at most 6 cells in 10 failing, on the demo's shape."""
    factors = matrix(a="01", b="012", c="01", d="012")
    while True:
        planted = [
            {factor.name: draw.choice(factor.levels) for factor in draw.sample(factors, draw.randint(1, 3))}
            for _ in range(draw.randint(1, 3))
        ]
        unjudged = frozenset(cell.number for cell in cells(factors) if draw.random() < share)
        case = Case(factors, tuple(planted), unjudged)
        if sum(case.bad(cell) for cell in case.cells) <= 0.6 * len(case.cells):
            return case


@pytest.mark.parametrize(("share", "fewest"), [(0.1, 0.9), (0.3, 0.7)])
def test_supported_causes_are_rarely_wrong(share: float, fewest: float) -> None:
    """Of 300 truths: under 2 % of supported causes are false, and most truths still get some cause."""
    draw = random.Random(0)
    supported = wrong = with_cause = 0
    for _ in range(300):
        case = random_case(draw, share)
        found = attribute(case.factors, case.results())
        with_cause += found.finding is Finding.CAUSE
        for cause in found.causes:
            if cause.standing is Standing.SUPPORTED:
                supported += 1
                wrong += case.false(cause.levels)
    assert supported > 100
    assert wrong < 0.02 * supported
    assert with_cause >= fewest * 300


def test_a_finite_cell_that_never_met_the_bad_record_refutes_nothing() -> None:
    """With three steps each, batch size 1 never reaches the record that batch size 8 meets."""
    factors = (Factor("batch_size", ("1", "8")), Factor("attention", ("sdpa", "eager")))

    def outcome(levels: Mapping[str, str]) -> Outcome:
        if levels["batch_size"] == "8":
            return replace(NONFINITE, suspects=("r5", "r6"), records=("r5", "r6"))
        return replace(FINITE, records=("r1", "r2"))

    found = attribute(factors, ran(factors, outcome))
    assert found.finding is Finding.UNDECIDED
    assert found.causes == ()
    assert "cells 1 and 2" in caution(found, "different_records").text
    assert found.strangers == (1, 2)
    same = attribute(factors, ran(factors, lambda levels: replace(outcome(levels), records=("r1", "r2", "r5", "r6"))))
    assert [cause.levels for cause in same.causes] == [{"batch_size": ("8",)}]
    blind = attribute(factors, ran(factors, lambda levels: replace(outcome(levels), records=())))
    assert blind.causes == ()
    assert "cells 1 and 2 is not known to have met" in caution(blind, "unknown_records").text
    assert "different_records" not in codes(blind)


def test_a_finite_cell_with_missing_ids_is_not_said_to_have_met_other_records() -> None:
    """It refutes nothing either: what the missing batches held is anybody's guess."""
    factors = (Factor("batch_size", ("1", "2", "8")), Factor("attention", ("sdpa", "eager")))

    def outcome(levels: Mapping[str, str]) -> Outcome:
        if levels["batch_size"] != "1" and levels["attention"] == "eager":
            return replace(NONFINITE, suspects=("r5", "r6"))
        return replace(FINITE, records=("r1", "r5"), all_records=False)

    found = attribute(factors, ran(factors, outcome))
    assert found.finding is Finding.UNDECIDED
    assert "cells 1, 2, 3 and 5 is not known" in caution(found, "unknown_records").text
    assert "different_records" not in codes(found)
    assert "unknown_records" not in codes(attribute(factors, ran(factors, lambda levels: FINITE)))


def test_a_level_that_only_met_other_records_is_not_called_neutral() -> None:
    """It was finite: who knows what it does with the records that failed elsewhere."""
    factors = (Factor("batch_size", ("1", "2", "8")), Factor("attention", ("sdpa", "eager")))

    def outcome(levels: Mapping[str, str]) -> Outcome:
        if levels["batch_size"] == "1":
            return replace(FINITE, records=("r1",))
        bad = levels["attention"] == "eager"
        return replace(NONFINITE if bad else FINITE, suspects=("r5",) if bad else (), records=("r1", "r5"))

    found = attribute(factors, ran(factors, outcome))
    assert [cause.levels for cause in found.causes] == [{"attention": ("eager",)}]
    assert found.neutral == ()
    assert found.causes[0].unseen == {"batch_size": ("1",)}


def test_a_finite_cell_that_stopped_short_of_unknown_records_refutes_nothing() -> None:
    """Where no ids are known, only going as far as was asked makes cells comparable."""
    factors = (Factor("batch_size", ("1", "8")), Factor("attention", ("sdpa", "eager")))
    short = (Note("fewer_steps", "the command ended by itself after 3 of 24 optimizer steps"),)

    def outcome(levels: Mapping[str, str]) -> Outcome:
        return NONFINITE if levels["batch_size"] == "8" else replace(FINITE, doubts=short)

    found = attribute(factors, ran(factors, outcome))
    assert found.causes == ()
    assert found.strangers == (1, 2)
    whole = attribute(factors, ran(factors, lambda levels: replace(outcome(levels), doubts=())))
    assert [cause.levels for cause in whole.causes] == [{"batch_size": ("8",)}]
