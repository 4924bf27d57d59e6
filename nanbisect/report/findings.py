"""The evidence beside the verdict: of each cause, of neutral settings, and the attempts' own notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nanbisect.attribution import Attribution, Cause, Standing
from nanbisect.neutrality import Divergence, listed
from nanbisect.outcome import CellResult, Note, Outcome
from nanbisect.report.examples import Pair, pair_of_cause
from nanbisect.report.inputs import RunInputs
from nanbisect.report.words import clip, code, combination, counted, figure, one_line, status_words, was

STANDINGS = {
    Standing.PROVED: "proved",
    Standing.SUPPORTED: "supported",
    Standing.NOT_TOLD_APART: "not told apart",
}
SHOWN_CELLS = 8
LONGEST_REASON = 400


@dataclass(frozen=True)
class CauseReport:
    """A cause in words, its evidence a sentence each, and the cells that show it."""

    cause: Cause
    words: str
    standing: str
    evidence: tuple[str, ...]
    pair: Pair | None


@dataclass(frozen=True)
class Tally:
    """Cells that share a note or a reason: its code (or status), the first one's sentence, the cells."""

    code: str
    text: str
    cells: tuple[int, ...]


def cause_reports(inputs: RunInputs) -> tuple[CauseReport, ...]:
    """Every cause of the attribution, in its order."""
    return tuple(
        CauseReport(
            cause=cause,
            words=combination(cause.levels),
            standing=STANDINGS[cause.standing],
            evidence=tuple(_evidence(cause)),
            pair=pair_of_cause(inputs, cause),
        )
        for cause in inputs.attribution.causes
    )


def _evidence(cause: Cause) -> Iterator[str]:
    untested = f"; {cause.untested:,} not judged" if cause.untested else ""
    cells = "matching cell" if cause.matching == 1 else "matching cells"
    yield f"{cause.failed} of {cause.matching:,} {cells} failed{untested}."
    if cause.checked and cause.untested:
        of = "every level of every other factor" if cause.checked == 1 else f"all levels of any {cause.checked} others"
        yield f"It failed together with {of}, as far as those could be judged."
    for name, others in cause.needed.items():
        if others:
            happened = [f"{code(f'{name}={level}')} {_happened(word)}" for level, word in others.items()]
            yield f"With only this changed: {listed(happened, SHOWN_CELLS)}."
    if cause.witnesses:
        many = "cell" if len(cause.witnesses) == 1 else "cells"
        yield f"Finite without one part: {many} {listed(cause.witnesses, SHOWN_CELLS)}."
    if cause.unseen:
        levels = [code(f"{name}={level}") for name, seen in cause.unseen.items() for level in seen]
        yield f"Never judged together with {listed(levels, SHOWN_CELLS)}."
    if cause.alternatives:
        rivals = "; ".join(combination(other) for other in cause.alternatives[:SHOWN_CELLS])
        yield f"The same failures are explained by: {rivals}."
    if cause.deciding:
        many = "Cell" if len(cause.deciding) == 1 else "Cells"
        yield f"{many} {listed(cause.deciding, SHOWN_CELLS)} would tell."


def _happened(word: str) -> str:
    """`finite`, `non-finite`, `finite in some cells only`, `not judged (unsupported)`, `not run`."""
    plain = {"finite": "is finite", "nonfinite": "is non-finite", "mixed": "is finite in some cells only"}
    return plain.get(word) or ("was not run" if word == "not_run" else f"was not judged ({status_words(word)})")


# neutral settings


def no_difference(attribution: Attribution) -> str | None:
    """The factors that made no difference, as a sentence."""
    if not attribution.neutral:
        return None
    return f"No difference made: {listed([code(name) for name in attribution.neutral], SHOWN_CELLS)}."


def neutrality(attribution: Attribution) -> tuple[str, ...]:
    """One sentence a divergence; without any, how many pairs agreed."""
    if attribution.divergences:
        return tuple(_divergence(moved) for moved in attribution.divergences)
    if not attribution.compared:
        return ("No two finite cells that must agree at step 1 could be compared.",)
    pairs = counted(attribution.compared, "pair")
    agree = "agrees" if attribution.compared == 1 else "agree"
    return (
        f"{pairs} of finite cells that must agree at step 1 {was(attribution.compared)} compared and {agree} within "
        f"rounding{_at_most(attribution.largest)}.",
    )


def _at_most(largest: Mapping[str, float]) -> str:
    """`: at most 1.4 % apart in the loss, 0.2 % in the gradient norm`."""
    names = {"loss": "the loss", "grad_norm": "the gradient norm", "parameter": "one parameter's gradient"}
    parts = [f"{100 * largest[name]:.2g} % in {words}" for name, words in names.items() if name in largest]
    return f": at most {', '.join(parts)}" if parts else ""


def _divergence(moved: Divergence) -> str:
    names = {"loss": "the loss", "grad_norm": "the gradient norm"}
    what = names.get(moved.quantity, f"the gradient of {one_line(moved.quantity)}")
    one, two = moved.cells
    before, after = (figure(value) for value in moved.values)
    return (
        f"{listed([code(name) for name in moved.settings])} must not change the mathematics, but between cells {one} "
        f"and {two} {what} of step 1 moves from {before} to {after}: {moved.relative:.2g} relative, where rounding "
        f"explains {moved.tolerance:.2g}."
    )


# notes and reasons


def repairs(results: Sequence[CellResult]) -> tuple[Tally, ...]:
    """Silent repairs by code."""
    return _tallies((note, result) for result in results for attempt in result.attempts for note in attempt.repairs)


def doubts(results: Sequence[CellResult]) -> tuple[Tally, ...]:
    """Doubts of the attempts by code."""
    return _tallies((note, result) for result in results for attempt in result.attempts for note in attempt.doubts)


def reasons(results: Sequence[CellResult]) -> tuple[Tally, ...]:
    """Why cells were not judged, by status and reason, the commonest first."""
    unjudged = [(r, r.outcome) for r in results if r.outcome is not None and not r.outcome.judged]
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for result, outcome in unjudged:
        groups[(outcome.status.value, clip(one_line(outcome.reason), LONGEST_REASON))].append(result.cell.number)
    tallies = (Tally(status_words(status), text, tuple(cells)) for (status, text), cells in groups.items())
    return tuple(sorted(tallies, key=lambda tally: -len(tally.cells)))


def _tallies(notes: Iterator[tuple[Note, CellResult]]) -> tuple[Tally, ...]:
    first: dict[str, str] = {}
    cells: defaultdict[str, dict[int, None]] = defaultdict(dict)
    for note, result in notes:
        first.setdefault(note.code, clip(one_line(note.text), LONGEST_REASON))
        cells[note.code][result.cell.number] = None
    return tuple(Tally(code, text, tuple(cells[code])) for code, text in first.items())


def tally_words(tally: Tally) -> str:
    """`In 3 cells (1, 2 and 3): the GradScaler skipped 2 steps ...`."""
    numbers = listed(tally.cells, SHOWN_CELLS)
    where = f"cell {numbers}" if len(tally.cells) == 1 else f"{len(tally.cells)} cells ({numbers})"
    return f"{code(tally.code)} in {where}: {tally.text}"


def log_of(results: Sequence[CellResult]) -> tuple[CellResult, Outcome] | None:
    """The first cell of the commonest reason not to be judged whose log says anything."""
    for tally in reasons(results):
        for result in results:
            if result.cell.number in tally.cells and result.outcome and result.outcome.log_tail:
                return result, result.outcome
    return None
