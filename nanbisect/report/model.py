"""Everything a report says, computed once. Pure: the console and each file format only render it.

A sentence is one line of text in which backticks mark names and levels; see `words`. Texts that come
from data or logs are cleaned of line breaks and control characters, not of secrets: that is `redact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanbisect.attribution import Caution, Finding
from nanbisect.outcome import CellResult, Status
from nanbisect.report.examples import Pair, Step, next_steps, own_command, pair_of, quoted
from nanbisect.report.findings import (
    CauseReport,
    Tally,
    cause_reports,
    doubts,
    log_of,
    neutrality,
    no_difference,
    reasons,
    repairs,
)
from nanbisect.report.grid import Grid, build_grid
from nanbisect.report.inputs import NOT_RUN, RunInputs
from nanbisect.report.machine import environment_rows, training_rows, versions
from nanbisect.report.origins import Origin, origins
from nanbisect.report.places import Place, place_of, places, smears
from nanbisect.report.verdict import scope, verdict
from nanbisect.report.words import clip, figure, one_line

__all__ = ["Excerpt", "Report", "Row", "RunInputs", "build"]

LONGEST = 400
LOG_LINES = 20
SHOWN_PAIRS = 5
SHOWN_ORIGINS = 3


@dataclass(frozen=True)
class Row:
    """One cell in the table, as the texts of `Report.columns`. `status` is None when it was not run."""

    number: int
    status: str | None
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Excerpt:
    """The end of the log of a cell that was not judged."""

    number: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What a run says. `command` made it, `settings` (`k=v`) say what was trained and held constant.

    `rows` has every cell, or those that a search chose: `account` says what that shows. `scope` says how
    much was judged, where; `smear` what a check after clipping would have blamed; `pairs` a failing cell and
    its nearest finite neighbour for each cause. `columns` and `rows` are the table of cells.
    """

    name: str
    folder: str
    command: str
    finding: Finding
    verdict: str
    scope: str
    counts: Mapping[str, int]
    grid: Grid
    account: tuple[str, ...]
    causes: tuple[CauseReport, ...]
    no_difference: str | None
    places: tuple[Place, ...]
    origins: tuple[Origin, ...]
    smear: str | None
    neutrality: tuple[str, ...]
    repairs: tuple[Tally, ...]
    doubts: tuple[Tally, ...]
    reasons: tuple[Tally, ...]
    excerpt: Excerpt | None
    cautions: tuple[Caution, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    settings: tuple[str, ...]
    pairs: tuple[Pair, ...]
    next_steps: tuple[Step, ...]
    environment: tuple[tuple[str, str], ...]
    versions: str

    @property
    def findings(self) -> tuple[str, ...]:
        """The sentences that belong right below the verdict."""
        born = [f"Cell {origin.cell}, traced: {origin.head}" for origin in self.origins[:SHOWN_ORIGINS]]
        return tuple(text for text in (self.scope, *born, self.smear, self.no_difference, *self.neutrality) if text)


def build(inputs: RunInputs) -> Report:
    """Everything the report of a run says."""
    attribution, matrix, ordered = inputs.attribution, inputs.matrix, inputs.ordered
    causes = cause_reports(inputs)
    pairs = _pairs(inputs, causes)
    names = tuple(factor.name for factor in matrix.factors)
    return Report(
        name=one_line(matrix.name),
        folder=one_line(inputs.folder),
        command=quoted(*own_command(inputs)),
        finding=attribution.finding,
        verdict=verdict(inputs),
        scope=scope(inputs),
        counts=inputs.counts,
        grid=build_grid(matrix, ordered),
        account=inputs.search.sentences() if inputs.search else (),
        causes=causes,
        no_difference=no_difference(attribution),
        places=places(inputs.failing),
        origins=origins(inputs.failing),
        smear=smears(inputs.failing),
        neutrality=neutrality(attribution),
        repairs=repairs(ordered),
        doubts=doubts(ordered),
        reasons=reasons(ordered),
        excerpt=_excerpt(inputs),
        cautions=inputs.cautions,
        columns=("cell", *names, "status", "what", "loss", "norm", "time"),
        rows=tuple(_row(result, names) for result in ordered),
        settings=tuple(f"{name}={value}" for name, value in training_rows(inputs)),
        pairs=pairs,
        next_steps=next_steps(inputs, pairs),
        environment=environment_rows(inputs),
        versions=versions(inputs),
    )


def _pairs(inputs: RunInputs, causes: tuple[CauseReport, ...]) -> tuple[Pair, ...]:
    """One pair a failing cell; without a cause, of the first failing cell."""
    found = [report.pair for report in causes] or [pair_of(inputs, {})]
    by_number = {pair.failing.number: pair for pair in reversed(found) if pair}
    return tuple(reversed(by_number.values()))[:SHOWN_PAIRS]


def _excerpt(inputs: RunInputs) -> Excerpt | None:
    found = log_of(inputs.ordered)
    if found is None:
        return None
    result, outcome = found
    return Excerpt(result.cell.number, tuple(clip(one_line(line), LONGEST) for line in outcome.log_tail[-LOG_LINES:]))


def _row(result: CellResult, factors: tuple[str, ...]) -> Row:
    outcome, status = result.outcome, result.status
    numbers = [values[0] if values else None for values in (outcome.loss, outcome.grad_norm)] if outcome else [None] * 2
    texts = (
        str(result.cell.number),
        *(result.cell.levels[name] for name in factors),
        status.value if status else NOT_RUN.replace("_", " "),
        _what(result),
        *("" if value is None else figure(value) for value in numbers),
        f"{sum(attempt.seconds for attempt in result.attempts):.1f} s" if result.attempts else "",
    )
    return Row(result.cell.number, status.value if status else None, tuple(one_line(text) for text in texts))


def _what(result: CellResult) -> str:
    """Where a cell failed, or why it was not judged; nothing to say of a finite one."""
    if result.status is Status.NONFINITE:
        return place_of(result)
    return clip(result.outcome.reason, LONGEST) if result.outcome and not result.outcome.judged else ""
