"""The search: what it guarantees over random truths, and what it does in the cases one can follow by hand."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from nanbisect.attribution import Standing, attribute
from nanbisect.matrix import Factor, Matrix, expand
from nanbisect.outcome import CellResult, Outcome, Status
from nanbisect.report.completeness import completeness
from nanbisect.search.evidence import Evidence
from nanbisect.search.propose import account, propose
from nanbisect.search.space import Space, holds, within
from nanbisect.search.steps import account_now, next_choices
from nanbisect.search.values import (
    Account,
    Choice,
    Combination,
    Kind,
    Plan,
    Row,
    Strategy,
    Trial,
    distinct,
    highest_share,
)
from tests.bench.planted import GRIDS, Truth, rows_of, space_of, table, truth
from tests.bench.search import solve, violations

Judge = Callable[[Row], Status]

DEMO = Matrix(
    "demo",
    "sft",
    (
        Factor("gradient_checkpointing", ("off", "on")),
        Factor("batch_size", ("1", "2", "8")),
        Factor("channel_weights", ("1,8", "1,32")),
        Factor("attention", ("sdpa", "eager", "flash")),
    ),
)
SPACE = Space.of(DEMO)
NO_FLASH = Space.of(DEMO, [{"attention": "flash"}])


def demo(row: Row) -> Status:
    """The demo on a machine without FlashAttention."""
    if row[3] == 2:
        return Status.UNSUPPORTED
    return Status.NONFINITE if row[3] == 1 and row[1] else Status.FINITE


def judge(*causes: Combination) -> Judge:
    return lambda row: Status.NONFINITE if any(holds(row, cause) for cause in causes) else Status.FINITE


def searched(
    space: Space, ends: Judge, plan: Plan, *, free: int = 1, trials: Sequence[Trial] = ()
) -> tuple[list[Choice], Account, list[Trial]]:
    """Runs what is proposed, `free` cells at a time, until it is done."""
    made, chosen = list(trials), list[Choice]()
    while True:
        step = propose(space, made, plan, free=free)
        if not step.choices:
            assert step.done
            return chosen, step.account, made
        assert len(step.choices) <= free and not step.done
        chosen += step.choices
        made += [Trial(choice.row, ends(choice.row), choice.seed) for choice in step.choices]


def found(account_: Account) -> list[Combination]:
    return [cause.levels for cause in account_.causes]


# The guarantee, over random truths


def check_guarantee(planted: Truth, account_: Account, strength: tuple[int, int]) -> None:
    """Its three parts and minimality, for a search that ran to its end with every cell judged."""
    assert not list(violations(planted, account_, strength))
    assert account_.refuted + account_.explained == len(_combinations(planted.sizes, strength[0]))


def _combinations(sizes: Sequence[int], t: int) -> list[Combination]:
    return [
        tuple(zip(factors, levels, strict=True))
        for size in range(1, t + 1)
        for factors in itertools.combinations(range(len(sizes)), size)
        for levels in itertools.product(*(range(sizes[f]) for f in factors))
    ]


PIECES = [
    *(("2x3x2x3", piece, 250, (3, 2)) for piece in range(8)),
    ("2x3x2x3", 8, 250, (2, 1)),
    ("2x3x2x3", 9, 60, (3, 3)),
    ("2x3x2x3", 10, 100, (1, 0)),
    *(("2^4x3^4", piece, 40, (3, 2)) for piece in range(2)),
    ("2^4x3^4", 2, 40, (2, 1)),
    *(("3^8", piece, 25, (3, 2)) for piece in range(2)),
    ("3^8", 2, 30, (2, 1)),
    *(("2^12", piece, 35, (3, 2)) for piece in range(2)),
    ("2^12", 2, 40, (2, 1)),
]


@pytest.mark.parametrize(("grid", "piece", "count", "strength"), PIECES)
def test_the_guarantee_holds_for_random_truths(grid: str, piece: int, count: int, strength: tuple[int, int]) -> None:
    """No cause of up to t factors is missed; of up to u causes none is too broad; all parts are needed."""
    chance = random.Random(f"guarantee {grid} {piece}")
    for _ in range(count):
        planted = truth(GRIDS[grid], chance)
        evidence, account_ = solve(planted, Plan(strength=strength))
        check_guarantee(planted, account_, strength)
        assert evidence.spent == account_.cells == account_.attempts <= len(planted.fails)


def test_levels_that_act_alike_count_as_one_cause() -> None:
    """Three minimal combinations, of which two differ in one level: with u = 2 none may come out too broad."""
    chance, sizes, checked = random.Random("alike"), (2, 3, 2, 3), 0
    while checked < 150:
        base = tuple(
            (f, chance.randrange(sizes[f])) for f in sorted(chance.sample((0, 2, 3), chance.choice((0, 1, 2))))
        )
        other = tuple(
            (f, chance.randrange(sizes[f])) for f in sorted(chance.sample(range(4), chance.choice((1, 2, 3))))
        )
        causes = (*(tuple(sorted((*base, (1, at)))) for at in (1, 2)), other)
        fails = table(sizes, causes)
        if fails[0] or any(within(one, two) for one, two in itertools.permutations(causes, 2)):
            continue
        failing = tuple(rows_of(sizes)[chance.choice(list(np.flatnonzero(fails)))].tolist())
        planted = Truth(sizes, causes, fails, np.zeros(len(fails), bool), failing)
        assert distinct(causes) <= 2
        check_guarantee(planted, solve(planted, Plan())[1], (3, 2))
        checked += 1


def test_four_causes_are_more_than_is_promised_and_none_of_three_factors_is_missed() -> None:
    chance = random.Random("four causes")
    for _ in range(60):
        planted = truth(GRIDS["2x3x2x3"], chance, causes=(4,))
        check_guarantee(planted, solve(planted, Plan())[1], (3, 2))


@pytest.mark.parametrize(("grid", "count"), [("2x3x2x3", 200), ("2^4x3^4", 25)])
def test_with_cells_unjudged_nothing_false_is_proved_and_nothing_is_passed_over(grid: str, count: int) -> None:
    """A cause that failed in every cell that holds it, with witnesses for every part, is one. A planted cause is
    reported, or what hides it is listed as untestable."""
    chance = random.Random(f"unjudged {grid}")
    exact = 0
    for _ in range(count):
        planted = truth(GRIDS[grid], chance, unjudged=0.1)
        account_ = solve(planted, Plan())[1]
        for known in account_.causes:
            if known.exhaustive and known.minimal:
                assert planted.fails[table(planted.sizes, [known.levels])].all()
                for part in known.levels:
                    shorter = tuple(other for other in known.levels if other != part)
                    assert not planted.fails[table(planted.sizes, [shorter])].all() or not shorter
        assert not account_.pending and not account_.open
        claimed = table(planted.sizes, found(account_))
        for cause in planted.causes:
            held = table(planted.sizes, [cause])
            assert account_.untestable or claimed[held].all() or any(within(one, cause) for one in found(account_))
        exact += planted.exact(found(account_))
    assert exact >= 0.98 * count


def test_what_the_attribution_proves_after_a_search_is_true() -> None:
    """With cells that are not judged, too: the search chooses the cells, the attribution is the judge."""
    chance = random.Random("attribution")
    proved = 0
    for turn in range(60):
        planted = truth(GRIDS["2x3x2x3"], chance, unjudged=0.1 * (turn % 2))
        evidence, _ = solve(planted, Plan())
        results = as_results(space_of(planted.sizes), planted, evidence)
        for cause in attribute(space_of(planted.sizes).factors, results).causes:
            if cause.standing is Standing.PROVED:
                proved += 1
                rows = rows_of(planted.sizes).tolist()
                held = [all(str(row[ord(f) - 97]) in levels for f, levels in cause.levels.items()) for row in rows]
                assert planted.fails[held].all()
    assert proved > 60


def as_results(space: Space, planted: Truth, evidence: Evidence) -> tuple[CellResult, ...]:
    cells = expand(Matrix("m", "sft", space.factors))
    rows = [(cell, space.row(cell.levels)) for cell in cells]
    return tuple(CellResult(cell, (outcome(planted, row),) if row in evidence.cells else ()) for cell, row in rows)


def outcome(planted: Truth, row: Row) -> Outcome:
    return Outcome(planted.ends(row), "planted")


# Failures that come and go


def test_failures_that_come_and_go_are_found_by_counting_exposures() -> None:
    chance = random.Random("flaky")
    exact = 0
    for _ in range(25):
        planted = truth(GRIDS["2x3x2x3"], chance, p=chance.uniform(0.5, 1))
        evidence, account_ = solve(planted, Plan(flaky=True), cap=300)
        assert account_.flaky and account_.exposures == 5 and evidence.spent < 300
        assert account_.bound is not None and account_.bound <= highest_share(5)
        exact += planted.exact(found(account_))
    assert exact >= 24


def test_the_mode_for_that_switches_itself_on() -> None:
    row = (1, 2, 1, 1)
    trials = [Trial(SPACE.baseline, Status.FINITE), Trial(row, Status.FINITE, 1), Trial(row, Status.NONFINITE, 2)]
    assert not account(SPACE, trials[:2], Plan()).flaky
    assert account(SPACE, trials, Plan()).flaky
    assert not account(SPACE, trials, Plan(flaky=False)).flaky


def test_seeds_vary_over_cells_when_failures_come_and_go() -> None:
    """A seed that hides the failure must not be the only one that a combination was exposed to."""
    chosen, _, _ = searched(NO_FLASH, judge(((3, 1),)), Plan(flaky=True, budget=40))
    seeds = [choice.seed for choice in chosen]
    assert len({*seeds}) >= 5
    assert len({(choice.row, choice.seed) for choice in chosen}) == len(chosen)
    assert any("repeats a cell" in choice.why for choice in chosen)


@pytest.mark.parametrize(
    ("p_min", "alpha", "exposures"), [(0.5, 0.05, 5), (0.5, 0.01, 7), (0.7, 0.05, 3), (0.9, 0.05, 2)]
)
def test_exposures_that_refute(p_min: float, alpha: float, exposures: int) -> None:
    assert Plan(p_min=p_min, alpha=alpha).exposures == exposures


@pytest.mark.parametrize(("n", "bound"), [(0, 1.0), (1, 0.95), (5, 0.45), (10, 0.26), (59, 0.05)])
def test_nothing_seen_in_n_attempts_leaves_a_share_possible(n: int, bound: float) -> None:
    assert highest_share(n) == pytest.approx(bound, abs=0.006)


# The demo


def test_the_demo_is_solved_at_pairs_by_a_few_cells() -> None:
    chosen, result, trials = searched(NO_FLASH, demo, Plan(strength=(2, 1)))
    assert found(result) == [((1, 1), (3, 1)), ((1, 2), (3, 1))]
    assert len(chosen) <= 16 and result.cells == len(chosen)
    assert result.distinct == 1 and result.verified and not result.complete
    assert (result.pending, result.untestable) == (0, 8)
    assert all(cause.minimal and cause.checked == 1 for cause in result.causes)
    assert {trial.status for trial in trials} == {Status.FINITE, Status.NONFINITE}


def test_the_demo_says_why_it_runs_each_cell() -> None:
    chosen, _, _ = searched(NO_FLASH, demo, Plan())
    assert chosen[0] == Choice((0, 0, 0, 0), 1, Kind.CONTROL, "control: the baseline")
    assert chosen[1].row == (1, 2, 1, 0) and chosen[1].kind is Kind.CONTROL
    whys = [choice.why for choice in chosen]
    assert "covers 2 untried levels" in whys
    assert any(re.fullmatch(r"tells apart batch_size=2 .*from .*attention=eager.*", why) for why in whys)
    assert any(why.startswith("checks batch_size=") for why in whys)


def test_cells_that_are_never_judged_are_not_chased() -> None:
    """FlashAttention is not known to be missing: three cells tell, the rest is listed."""
    _, result, trials = searched(SPACE, demo, Plan(strength=(2, 1)))
    assert found(result) == [((1, 1), (3, 1)), ((1, 2), (3, 1))]
    assert sum(trial.status is Status.UNSUPPORTED for trial in trials) <= 3
    assert (result.pending, result.untestable) == (0, 8)
    assert ((3, 2),) in result.samples
    assert "8 are not testable here" in result.claims[0]


def test_the_account_of_the_whole_grid_is_that_of_the_report() -> None:
    trials = [Trial(row, demo(row)) for row in itertools.product(*(range(size) for size in SPACE.sizes))]
    mine = account(SPACE, trials, Plan())
    results = [CellResult(cell, (Outcome(demo(SPACE.row(cell.levels)), ""),)) for cell in expand(DEMO)]
    theirs = completeness(DEMO.factors, results, attribute(DEMO.factors, results).causes)
    assert {name: getattr(mine, name) for name in ("refuted", "explained", "untestable", "pending")} == {
        name: count for name, count in theirs.items() if name != "up_to_factors"
    }
    assert all(cause.exhaustive and cause.failed == 4 for cause in mine.causes)


def test_when_everything_fails_no_cause_is_named_and_the_search_soon_stops() -> None:
    _, result, trials = searched(SPACE, judge(()), Plan())
    assert result.causes == () and len(result.open) == len(trials) <= 12 and not result.complete
    assert result.claims == ("Every cell that was judged failed: nothing can be said of causes.",)
    _, result, trials = searched(space_of((3,) * 12), judge(()), Plan())
    assert result.causes == () and len(trials) <= 30


def test_when_nothing_fails_what_was_looked_for_is_ruled_out() -> None:
    _, result, trials = searched(NO_FLASH, judge(), Plan(strength=(2, 1)))
    assert result.causes == () and len(trials) <= 10
    assert (result.refuted, result.untestable, result.pending) == (39, 8, 0)


def test_when_nothing_can_be_judged_the_search_soon_stops() -> None:
    _, result, trials = searched(SPACE, lambda row: Status.FAILED, Plan())
    assert result.causes == () and len(trials) <= 6 and result.untestable == 107


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (3, 2)])
def test_small_matrices(sizes: tuple[int, ...]) -> None:
    _, result, _ = searched(space_of(sizes), judge(((0, 1),)), Plan())
    assert found(result) == [((0, 1),)] and result.complete and result.verified


# First cause


def test_first_cause_restores_one_factor_after_another() -> None:
    chosen, result, _ = searched(SPACE, demo, Plan(strategy=Strategy.FIRST_CAUSE))
    assert [choice.row for choice in chosen] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (1, 2, 0, 0),
        (1, 2, 1, 0),
        (1, 2, 1, 2),  # unsupported: the level before it is next
        (1, 2, 1, 1),  # fails
        (0, 2, 1, 1),
        (0, 0, 1, 1),
        (0, 2, 0, 1),
    ]
    assert found(result) == [((1, 2), (3, 1))]
    assert result.claims == ("One cause was looked for; nothing else was.",)
    assert chosen[5].why == "restores attention=eager" and chosen[7].why == "tells whether batch_size=8 is needed"


def test_first_cause_may_end_without_one() -> None:
    _, nothing, trials = searched(SPACE, judge(), Plan(strategy=Strategy.FIRST_CAUSE))
    assert not nothing.causes and len(trials) == 5
    _, all_of_it, trials = searched(SPACE, judge(()), Plan(strategy=Strategy.FIRST_CAUSE))
    assert not all_of_it.causes and len(trials) == 1 and len(all_of_it.open) == 1


# Slots, budgets, earlier outcomes


def test_the_same_answer_from_several_cells_at_a_time() -> None:
    """What is under way counts as unknown; no cell is proposed twice."""
    chance = random.Random("slots")
    for _ in range(30):
        planted = truth(GRIDS["2x3x2x3"], chance)
        chosen, result, _ = searched(space_of(planted.sizes), planted.ends, Plan(), free=4)
        rows = [choice.row for choice in chosen]
        assert len({*rows}) == len(rows)
        check_guarantee(planted, result, (3, 2))


def test_running_cells_are_waited_for() -> None:
    rows = [row for row in itertools.product(*(range(size) for size in SPACE.sizes)) if any(row)]
    step = propose(SPACE, [Trial(SPACE.baseline, Status.FINITE)], Plan(), running=rows)
    assert step.choices == () and not step.done


def test_the_budget_ends_it_early_and_the_account_stays_true() -> None:
    for budget in (1, 5, 12):
        chosen, result, _ = searched(NO_FLASH, demo, Plan(budget=budget), free=3)
        assert len(chosen) == budget and result.pending and not result.complete
        assert result.refuted + result.explained + result.untestable + result.pending == 107
        assert f"{result.pending} are not tried" in result.claims[0]


def test_earlier_outcomes_cost_nothing() -> None:
    first, whole, trials = searched(NO_FLASH, demo, Plan())
    earlier = [Trial(trial.row, trial.status, trial.seed, imported=True) for trial in trials]
    again, result, _ = searched(NO_FLASH, demo, Plan(budget=5), trials=earlier)
    assert again == [] and result == whole
    half, result, _ = searched(NO_FLASH, demo, Plan(budget=len(first)), trials=earlier[: len(first) // 2])
    assert found(result) == found(whole) and len(half) == len(first) - len(first) // 2


def test_evidence_that_is_kept_gives_the_same_choices_as_trials_from_the_start() -> None:
    planted = truth(GRIDS["2^4x3^4"], random.Random("kept"))
    evidence, trials = Evidence(space_of(planted.sizes), Plan()), list[Trial]()
    while choices := next_choices(evidence, free=2):
        assert tuple(choices) == propose(space_of(planted.sizes), trials, Plan(), free=2).choices
        for choice in choices:
            trials.append(Trial(choice.row, planted.ends(choice.row), choice.seed))
            evidence.add(trials[-1])
    assert account_now(evidence) == account(space_of(planted.sizes), trials, Plan())


def test_repeats_asked_for_are_made() -> None:
    chosen, _, _ = searched(NO_FLASH, demo, Plan(strength=(1, 0), repeats=2))
    seeds: dict[Row, list[int]] = {}
    for choice in chosen:
        seeds.setdefault(choice.row, []).append(choice.seed)
    assert {tuple(some) for some in seeds.values()} == {(1, 2)}


def test_of_cells_that_are_about_as_good_the_cheapest_is_run() -> None:
    """A pair may be covered with one level of f or another; over many truths, cells with the cheap one are run more."""

    def costly(row: Row) -> float:
        return (1.0, 2.0, 8.0)[row[5]]

    def total(cost: Callable[[Row], float] | None) -> float:
        chance, seconds = random.Random("costs"), 0.0
        for _ in range(20):
            planted = truth(GRIDS["2^4x3^4"], chance)
            evidence = Evidence(space_of(planted.sizes), Plan(strength=(2, 1)))
            while choices := next_choices(evidence, cost=cost):
                evidence.add(Trial(choices[0].row, planted.ends(choices[0].row)))
                seconds += costly(choices[0].row)
        return seconds

    assert total(costly) < 0.95 * total(None)


def test_the_grid_in_order() -> None:
    chosen, _, _ = searched(NO_FLASH, demo, Plan(strategy=Strategy.GRID))
    assert [choice.row for choice in chosen] == sorted(choice.row for choice in chosen)
    assert len(chosen) == 24


# Spaces


def test_excluded_cells_are_neither_run_nor_counted() -> None:
    rule = {"attention": "flash", "gradient_checkpointing": "on"}
    fixed = {"attention": "eager", "precision": "fp32"}
    space = Space.of(Matrix("m", "sft", DEMO.factors, settings={"precision": "bf16"}, exclude=(rule, fixed)))
    assert space.exclude == (((0, 1), (3, 2)),)
    assert space.count() == 30 and space.count(((3, 2),)) == 6 and space.count(((0, 1), (3, 2))) == 0
    chosen, result, _ = searched(space, judge(((3, 1), (1, 1))), Plan())
    assert all(space.legal(choice.row) for choice in chosen)
    assert result.complete and result.of_cells == 30
    assert result.refuted + result.explained == 107 - 1 - 3 - 2  # no cell holds the rule, or a triple with it


def test_a_rule_that_a_fixed_setting_meets_is_left_with_its_factors() -> None:
    exclude = ({"attention": "eager", "precision": "bf16"},)
    space = Space.of(Matrix("m", "sft", DEMO.factors, settings={"precision": "bf16"}, exclude=exclude))
    assert space.exclude == (((3, 1),),) and space.count() == 24


@pytest.mark.parametrize("rules", [(), (((0, 1), (1, 1)), ((1, 1), (2, 1)), ((3, 2),), ((0, 0), (2, 0), (3, 1)))])
def test_counting_and_completing_agree_with_the_enumerated_grid(rules: tuple[Combination, ...]) -> None:
    space = Space(DEMO.factors, exclude=rules)
    rows = [row for row in itertools.product(*(range(size) for size in space.sizes)) if space.legal(row)]
    for combination in _combinations(space.sizes, 4):
        held = [row for row in rows if holds(row, combination)]
        assert space.count(combination) == len(held)
        completed = space.completion(combination, rules, like=(1, 2, 1, 1))
        assert completed in held if held else completed is None


def test_a_cause_of_more_factors_than_are_looked_for_is_found_where_it_fails() -> None:
    cause = tuple((f, 1) for f in range(5))
    space = space_of((2,) * 8)
    failing = Trial((1, 1, 1, 1, 1, 0, 1, 0), Status.NONFINITE)
    _, result, _ = searched(space, judge(cause), Plan(), trials=[failing])
    assert found(result) == [cause]
    assert result.causes[0].minimal and result.complete


def test_whatever_the_cells_do_the_search_ends_and_its_account_adds_up() -> None:
    """Random rules, random ends (also of repeated attempts), several slots, any strategy."""
    chance = random.Random("anything")
    for _ in range(120):
        sizes = tuple(chance.randrange(2, 4) for _ in range(chance.randrange(1, 6)))
        rules = [_rule(sizes, chance) for _ in range(chance.randrange(4))]
        split = chance.randrange(len(rules) + 1)
        space = Space(space_of(sizes).factors, exclude=tuple(rules[:split]), blocked=tuple(rules[split:]))
        plan = Plan(
            strategy=chance.choice([*Strategy]),
            strength=(chance.randrange(1, 5), chance.randrange(3)),
            flaky=chance.choice([None, None, False, True]),
            repeats=chance.choice([1, 1, 2]),
            budget=chance.choice([None, 15]),
        )
        chosen, result, _ = searched(space, _anything(chance), plan, free=3)
        assert all(space.runnable(choice.row) for choice in chosen)
        assert len({(choice.row, choice.seed) for choice in chosen}) == len(chosen)
        legal = [row for row in rows_of(sizes).tolist() if space.legal(tuple(row))]
        total = sum(any(holds(tuple(row), c) for row in legal) for c in _combinations(sizes, plan.strength[0]))
        assert result.refuted + result.explained + result.untestable + result.pending == total


def _anything(chance: random.Random) -> Judge:
    weights = [chance.random() for _ in range(3)]
    return lambda row: chance.choices([Status.FINITE, Status.NONFINITE, Status.FAILED], weights)[0]


def _rule(sizes: Sequence[int], chance: random.Random) -> Combination:
    factors = sorted(chance.sample(range(len(sizes)), min(len(sizes), chance.choice((1, 2, 2, 3)))))
    return tuple((f, chance.randrange(sizes[f])) for f in factors)


# Large grids, and time


LARGE: list[tuple[tuple[int, ...], tuple[Combination, ...]]] = [
    ((2,) * 17, (((1, 1), (13, 1)), ((2, 0), (4, 1), (9, 0)))),
    ((3,) * 10 + (2,), (((0, 1), (7, 0), (10, 1)), ((4, 2),))),
    ((4,) * 10, (((1, 2), (6, 1)),)),
]


@pytest.mark.parametrize(("sizes", "causes"), LARGE)
def test_a_grid_too_large_to_enumerate_is_searched_all_the_same(
    sizes: tuple[int, ...], causes: tuple[Combination, ...]
) -> None:
    space, trials, slowest = space_of(sizes), list[Trial](), 0.0
    evidence, ends = Evidence(space, Plan()), judge(*causes)
    while True:
        start = time.perf_counter()
        choices = next_choices(evidence)
        slowest = max(slowest, time.perf_counter() - start)
        if not choices:
            break
        trials.append(Trial(choices[0].row, ends(choices[0].row), choices[0].seed))
        evidence.add(trials[-1])
    result = account_now(evidence)
    assert sorted(found(result)) == sorted(causes) and result.complete and result.verified
    assert all(cause.matching == space.product // _product(sizes, cause.levels) for cause in result.causes)
    assert len({trial.row for trial in trials}) == len(trials) < 250
    assert slowest < 2


def _product(sizes: Sequence[int], combination: Combination) -> int:
    count = 1
    for f, _ in combination:
        count *= sizes[f]
    return count


def test_excluded_and_blocked_cells_of_a_large_grid_are_left_alone() -> None:
    factors = space_of((2,) * 16).factors
    space = Space(factors, exclude=(((0, 1), (1, 1)),), blocked=(((2, 1),),))
    evidence, ends = Evidence(space, Plan(strength=(2, 1))), judge(((3, 1), (4, 1)))
    while choices := next_choices(evidence):
        assert space.runnable(choices[0].row)
        evidence.add(Trial(choices[0].row, ends(choices[0].row)))
    result = account_now(evidence)
    assert found(result) == [((3, 1), (4, 1))]
    assert result.pending == 0 and result.untestable == 31  # the blocked level, alone and in pairs


def test_a_small_grid_is_answered_at_once() -> None:
    trials = [Trial(row, demo(row)) for row in itertools.product(*(range(size) for size in SPACE.sizes))][::2]
    propose(SPACE, trials[:2], Plan())
    start = time.perf_counter()
    propose(SPACE, trials, Plan())
    assert time.perf_counter() - start < 0.2
