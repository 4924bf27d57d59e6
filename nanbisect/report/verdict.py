"""The verdict: what was found and where it surfaced, in plain sentences.

Only what was judged is said. Each finding has its own two sentences; a non-finite baseline and an
interrupted run are added to any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from nanbisect.attribution import Cause, Finding, Standing
from nanbisect.neutrality import ADVICE, listed
from nanbisect.outcome import Status
from nanbisect.report.inputs import NOT_RUN, RunInputs, holds
from nanbisect.report.places import loaded_bad, surfaces
from nanbisect.report.search import SearchSummary
from nanbisect.report.words import clip, code, combination, counted, kinds, one_line, status_words, was
from nanbisect.search.values import Strategy, highest_share

SHOWN_CAUSES = 3
SHOWN_RIVALS = 4
SHOWN_COMMON = 3
ASKED_FOR = ("attention", "gradient_checkpointing")  # what a recipe of the user's must ask for to have it
USUAL_SUSPECTS = ("attention", "gradient_checkpointing", "batch_size", "precision")


def verdict(inputs: RunInputs) -> str:
    """The finding in two sentences, and what must be said with it."""
    head = _HEADS[inputs.attribution.finding](inputs)
    return " ".join([*head, *_baseline(inputs), *_interrupted(inputs)])


def scope(inputs: RunInputs) -> str:
    """How many cells were judged, where, in how many steps and records."""
    total, others = inputs.total, [_counted_status(inputs, name) for name in _unjudged(inputs)]
    text = (
        f"{inputs.judged} of {_many(total)} {was(inputs.judged)} judged on {one_line(inputs.device)}: "
        f"{len(inputs.finite)} finite, {len(inputs.failing)} non-finite"
    )
    rest = f"; {listed(others)}" if others else ""
    excluded = f" The matrix excludes {counted(inputs.excluded, 'more combination')}." if inputs.excluded else ""
    return f"{text}{rest}.{excluded}{_may_hide(inputs)}"


def _may_hide(inputs: RunInputs) -> str:
    """What repeats that were all finite leave possible. A seed that is repeated is no further evidence."""
    seeds = [{o.seed for o in result.attempts if o.judged} for result in inputs.finite]
    fewest = min(map(len, seeds), default=0)
    if fewest < 2:
        return ""
    return (
        f" Every finite cell was finite with {fewest} seeds or more: 0 of {fewest} leaves up to "
        f"{100 * highest_share(fewest):.0f} % of its attempts that may fail (Clopper-Pearson, 95 %)."
    )


def _many(cells: int) -> str:
    return counted(cells, "cell") if cells < 10_000 else f"{cells:,} cells"


def not_varied(inputs: RunInputs) -> tuple[str, ...]:
    """Suspects that the matrix leaves alone, as far as the recipe asks for them at all."""
    told = [result.outcome.resolved for result in inputs.ordered if result.outcome]
    read = next((resolved["read_by_recipe"] for resolved in told if "read_by_recipe" in resolved), None)
    users = (inputs.matrix.recipe or "").endswith(".py")
    idle = [name for name in ASKED_FOR if users and read is not None and name not in read]
    return tuple(name for name in USUAL_SUSPECTS if inputs.matrix.factor(name) is None and name not in idle)


def known(inputs: RunInputs) -> tuple[Cause, ...]:
    """What may be called a cause."""
    return tuple(c for c in inputs.attribution.causes if c.standing is not Standing.NOT_TOLD_APART)


# one function a finding


def _cause(inputs: RunInputs) -> Iterator[str]:
    causes = known(inputs)
    yield _alone(inputs, causes[0]) if len(causes) == 1 else _several(inputs, causes)
    explained = [r for r in inputs.failing if any(holds(r.cell, cause.levels) for cause in causes)]
    yield surfaces(explained)
    left = len(inputs.failing) - len(explained)
    if left:
        yield f"The judged cells do not say what brings the other {counted(left, 'failure')}."


def _alone(inputs: RunInputs, cause: Cause) -> str:
    what = f"{combination(cause.levels)} brings the {_kind(inputs, cause)}"
    if cause.standing is Standing.PROVED:
        matching = counted(cause.matching, "matching cell")
        return f"{what}: {cause.failed} of {matching} failed, and {_ended(cause)}."
    judged = counted(cause.matching - cause.untested, "judged matching cell")
    return (
        f"{what} in every cell that was judged: {cause.failed} of {judged} failed, and {_ended(cause)}; "
        f"{counted(cause.untested, 'matching cell')} {was(cause.untested)} not judged."
    )


def _several(inputs: RunInputs, causes: Sequence[Cause]) -> str:
    """The first as the subject, the others beside it; their evidence is in the list of causes."""
    first, *others = [f"{combination(c.levels)} ({_tally(c)})" for c in causes[:SHOWN_CAUSES]]
    more = len(causes) - SHOWN_CAUSES
    others += [f"{counted(more, 'further combination')} listed below"] if more > 0 else []
    verb = "does" if len(others) == 1 else "do"
    return f"{first} brings the {_kind(inputs, causes[0])}, and so {verb} {'; and '.join(others)}."


def _tally(cause: Cause) -> str:
    judged = cause.matching - cause.untested
    if cause.standing is Standing.PROVED:
        return f"{cause.failed} of {counted(judged, 'matching cell')} failed"
    return f"in every cell that was judged, {cause.failed} of {judged}; {cause.untested} not judged"


def _kind(inputs: RunInputs, cause: Cause) -> str:
    return kinds([result for result in inputs.failing if holds(result.cell, cause.levels)])


def _ended(cause: Cause) -> str:
    """What changing one part does. Only `finite` wherever it was judged is an end; another cause may go on."""
    seen = {word for others in cause.needed.values() for word in others.values()}
    end = "can end it" if seen & {"mixed", Status.NONFINITE.value} else "ends it"
    changing = {1: "changing it", 2: "changing either part alone"}
    return f"{changing.get(len(cause.levels), 'changing any one part alone')} {end}"


def _undecided(inputs: RunInputs) -> Iterator[str]:
    causes = inputs.attribution.causes
    texts = dict.fromkeys(combination(c.levels) for c in causes)
    texts |= dict.fromkeys(combination(other) for cause in causes for other in cause.alternatives)
    shown, more = list(texts)[:SHOWN_RIVALS], len(texts) - SHOWN_RIVALS
    rivals = "; ".join([*shown, *([f"{more} more"] if more > 0 else [])])
    some = f"Some cells fail ({len(inputs.failing)} of {inputs.judged} judged)"
    if len(texts) > 1:
        yield f"{some}, but the judged cells do not tell apart: {rivals}."
    elif inputs.search and texts:
        yield f"{some}. Isolated so far, and not yet seen with enough other levels to call it a cause: {rivals}."
    elif texts:
        yield f"{some}, all of them with {rivals}, but too few cells were judged to call it a cause."
    else:
        yield f"{some}, but no combination of levels explains them."
    deciding = sorted({number for cause in causes for number in cause.deciding})
    if inputs.search:
        would = _more_cells(inputs.search)
    elif deciding:
        would = f"{'Cell' if len(deciding) == 1 else 'Cells'} {listed(deciding)} would decide."
    else:
        would = "No other cell of this matrix would decide: vary one more factor or level."
    yield f"{would} {surfaces(inputs.failing)}"


def _more_cells(search: SearchSummary) -> str:
    """What a search that may not call anything a cause could do yet."""
    if search.plan.strategy is Strategy.FIRST_CAUSE:
        return "Nothing else was looked for: `--strategy adaptive` checks it, and looks for every cause."
    if search.account.pending or search.account.open:
        return "More cells would decide: go on with `--resume`, without a `--budget`."
    return "A higher `--strength` would see it with more levels."


def _nothing_failed(inputs: RunInputs) -> Iterator[str]:
    matrix, seen = inputs.matrix, len({record for r in inputs.finite if r.outcome for record in r.outcome.records})
    over = f" over {counted(seen, 'record')}" if seen else ""
    unjudged = len(inputs.results) - inputs.judged
    rest = f"; {counted(unjudged, 'cell')} {was(unjudged)} not judged" if unjudged else ""
    yield (
        f"The NaN was not reproduced: none of {counted(inputs.judged, 'judged cell')} became non-finite in "
        f"{counted(matrix.steps, 'optimizer step')}{over}, on {one_line(inputs.device)}{rest}."
    )
    broken = [r for r in inputs.results if r.outcome and not r.outcome.judged and r.status is not Status.UNSUPPORTED]
    if broken:
        yield f"Make the {counted(len(broken), 'cell')} run that ended otherwise, before anything else is tried."
        return
    others = [code(name) for name in not_varied(inputs)]
    vary = f", and factors that this matrix does not vary ({listed(others)})" if others else ""
    yield (
        f"Next, try more steps ({code('--steps')}), more or other records, the data order of the run that failed{vary}."
    )


def _everything_failed(inputs: RunInputs) -> Iterator[str]:
    unjudged = len(inputs.results) - inputs.judged
    rest = f"; {counted(unjudged, 'cell')} {was(unjudged)} not judged" if unjudged else ""
    if inputs.judged == 1:
        yield f"The only judged cell failed, so there is nothing to compare it with{rest}."
    else:
        yield f"No setting here matters: all {inputs.judged} judged cells failed{rest}."
    look = "Look at the weights, the data and how they are loaded"
    yield f"{look}: {loaded_bad(inputs.failing)}. {surfaces(inputs.failing)}{_in_common(inputs)}"


def _in_common(inputs: RunInputs) -> str:
    """The few records that every failing batch held: other batch sizes and orders narrow them down."""
    batches = [set(result.outcome.suspects) for result in inputs.failing if result.outcome]
    common = set.intersection(*batches) if len(batches) > 1 else set()
    if not 0 < len(common) <= SHOWN_COMMON:
        return ""
    named = listed([code(name) for name in sorted(common)])
    return f" Every failing batch held the {'record' if len(common) == 1 else 'records'} {named}."


def _nothing_judged(inputs: RunInputs) -> Iterator[str]:
    names = _unjudged(inputs)
    if not names:
        yield "No cell was judged: the matrix has no cell."
        return
    commonest = max(names, key=lambda name: (name != NOT_RUN, inputs.counts[name]))
    told = [r.outcome for r in inputs.ordered if r.outcome and r.outcome.status.value == commonest]
    reasons = Counter(outcome.reason for outcome in told if outcome.reason)
    why = clip(one_line(reasons.most_common(1)[0][0]), 300) if reasons else ""
    because = f"; the commonest reason: {why.rstrip('.')}" if why else ""
    yield f"No cell was judged: {listed([_counted_status(inputs, name) for name in names])}{because}."
    yield "Run it to the end with `--resume`." if commonest == NOT_RUN else ADVICE[Status(commonest)]


_HEADS: dict[Finding, Callable[[RunInputs], Iterator[str]]] = {
    Finding.CAUSE: _cause,
    Finding.UNDECIDED: _undecided,
    Finding.NOTHING_FAILED: _nothing_failed,
    Finding.EVERYTHING_FAILED: _everything_failed,
    Finding.NOTHING_JUDGED: _nothing_judged,
}


# said with any finding


def _baseline(inputs: RunInputs) -> Iterator[str]:
    baseline = inputs.baseline
    if baseline is not None and baseline.status is Status.NONFINITE:
        yield f"The baseline itself (cell {baseline.cell.number}, all first levels) is non-finite."


def _interrupted(inputs: RunInputs) -> Iterator[str]:
    if inputs.interrupted:
        left = inputs.counts.get(NOT_RUN, 0)
        missing = f": {left} of {counted(len(inputs.results), 'cell')} {was(left)} not run" if left else ""
        yield "The search was interrupted." if inputs.search else f"The run was interrupted{missing}."
    elif inputs.ended and not inputs.search:
        left = inputs.counts.get(NOT_RUN, 0)
        yield f"The run ended early, for {inputs.ended}: {left} of {_many(inputs.total)} {was(left)} not run."


def _unjudged(inputs: RunInputs) -> list[str]:
    judged = (Status.FINITE.value, Status.NONFINITE.value)
    return [name for name in inputs.counts if name not in judged]


def _counted_status(inputs: RunInputs, name: str) -> str:
    return f"{inputs.counts[name]} {status_words(name)}"
