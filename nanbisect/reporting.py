"""From a run's files to its reports, its exit code and what is shown of it."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nanbisect import console as show
from nanbisect import schedule
from nanbisect.attribution import attribute
from nanbisect.cells import Cells
from nanbisect.choosing import Blocked, is_search, kept_of, summary_of
from nanbisect.judging import STOPPED
from nanbisect.machine import from_run_json
from nanbisect.matrix import Cell
from nanbisect.matrix_command import settings_of
from nanbisect.outcome import CellResult, Outcome, Status
from nanbisect.report.markdown import to_markdown
from nanbisect.report.model import Report, RunInputs, build
from nanbisect.report.redact import Redactor
from nanbisect.report.result import to_result
from nanbisect.store import Store
from nanbisect.tables import to_csv
from nanbisect.trainers.registry import VOCABULARIES

NOT_JUDGED, FOUND = 3, 1


def exit_code(results: Sequence[CellResult], *, known: bool = True) -> int:
    """0 all judged and finite, 1 non-finite found, 3 something was not judged (1 wins over 3).

    `known`: a search that did not need every cell came to its end, with nothing left that it could not judge.
    """
    statuses = {result.status for result in results}
    if Status.NONFINITE in statuses:
        return FOUND
    return 0 if statuses == {Status.FINITE} and known else NOT_JUDGED


def inputs_of(store: Store) -> RunInputs:
    """Everything a report needs, read from the run's files."""
    data = store.run()
    matrix, machine, occasion = from_run_json(data)
    cells = Cells(matrix)
    kept = kept_of(store.search(), cells)
    begun = store.cells(cells) if is_search(kept) else cells.every
    results = tuple(CellResult(cell, _ended(store.outcomes(cell))) for cell in begun)
    vocabulary = VOCABULARIES[matrix.trainer]
    vocabulary = replace(vocabulary, settings=settings_of(vocabulary, matrix.command, matrix.flags))
    neutral = frozenset(name for name, setting in vocabulary.settings.items() if setting.neutral)
    search = summary_of(matrix, machine.blocked, results, store.order(), kept) if is_search(kept) else None
    searched = search.searched(cells.count) if search else None
    results = (*_control(cells, begun, machine.blocked), *results)
    return RunInputs(
        matrix=matrix,
        results=results,
        attribution=attribute(matrix.factors, results, neutral_settings=neutral, searched=searched),
        environment=machine.environment,
        folder=store.folder.name,
        command=occasion.arguments,
        matrix_path=occasion.matrix_path,
        interrupted=not kept["ended"] if kept else any(result.status is None for result in results),
        excluded=matrix.combinations - cells.count(),
        notes=store.notes(),
        vocabulary=vocabulary,
        search=search,
        ended=kept.get("ended") or "",
    )


def _control(cells: Cells, begun: Sequence[Cell], blocked: Blocked) -> Iterator[CellResult]:
    """The baseline, where a search has not begun it: not run yet, or nothing that this machine can run."""
    levels = cells.matrix.baseline
    if cells.has(levels) and not any(cell.levels == levels for cell in begun):
        control = cells.cell(levels)
        reason = schedule.blocked_by(control, blocked)
        yield CellResult(control, (Outcome(Status.UNSUPPORTED, reason),) if reason else ())


def _ended(attempts: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Attempts that nanbisect stopped itself are no way for a cell to end: it counts as not run yet."""
    return tuple(outcome for outcome in attempts if outcome.reason != STOPPED["cancelled"])


def write(store: Store, console: Console) -> Report:
    """Write the three renderings and show the report."""
    inputs = inputs_of(store)
    report = build(inputs)
    store.write_report(
        markdown=to_markdown(report, redactor(store)), csv=to_csv(inputs.results), result=to_result(inputs)
    )
    show.show_report(console, report)
    console.print(f"\nreport: {store}/report.md", style="dim", highlight=False, soft_wrap=True)
    return report


def redactor(store: Store) -> Redactor:
    """Names and paths of this machine, to be kept out of what is published."""
    paths = {
        str(store.folder.resolve()): "<run>",
        str(store.folder): "<run>",
        str(Path.cwd()): ".",
        sys.prefix: "<python>",
    }
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    return Redactor(home=str(Path.home()), user=user, host=socket.gethostname(), paths=paths)
