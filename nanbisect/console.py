"""What a person sees: a live table while a run goes on, then the verdict, the grid and the cells."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanbisect.environment.checkup import Checkup
from nanbisect.environment.levels import Levels
from nanbisect.events import (
    CellEnded,
    CellStarted,
    Event,
    LevelBlocked,
    RunEnded,
    RunStarted,
    SlotNoted,
    StartNoted,
    TraceEnded,
    TraceStarted,
)
from nanbisect.matrix import Cell, Matrix
from nanbisect.outcome import Outcome, Status, named
from nanbisect.ranks import on_ranks
from nanbisect.report.model import Report
from nanbisect.report.words import counted, duration, one_line
from nanbisect.search.values import Plan, Strategy

STYLES = {
    Status.FINITE: "green",
    Status.NONFINITE: "bold red",
    Status.UNSUPPORTED: "dim",
}
LOOKING = "looking at this machine, and at what is to be trained"
RECENT = 12  # ended cells kept in the live table
WHOLE = 64  # cells shown in full after the run
EXCERPT = 8  # last lines of the log of a cell that was not judged
WIDE = 120  # columns of a terminal that has room for everything
SHORT = 10  # a heading's letters where there is less room
PIPE_WIDTH = 160  # columns when nobody's terminal says


def console_for(stream: TextIO | None = None) -> Console:
    """The console of this process; a pipe has no width, so it gets a wide one."""
    console = Console(file=stream)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(file=stream, width=PIPE_WIDTH)


def style_of(status: Status | None) -> str:
    """The colour of a status; whatever is not judged and not expected is yellow."""
    return "dim" if status is None else STYLES.get(status, "yellow")


def levels_of(cell: Cell, matrix: Matrix) -> str:
    """The cell's levels in the matrix's order."""
    return " ".join(f"{factor.name}={cell.levels[factor.name]}" for factor in matrix.factors)


def told(outcome: Outcome) -> str:
    """The few words that matter of an outcome: where it failed, or why it was not judged."""
    if outcome.site is not None:
        site = outcome.site
        first = f", first {site.parameters[0]}" if site.parameters else ""
        where = f", {words}" if (words := on_ranks(site, brief=True)) else ""
        return one_line(f"{site.kind} in {site.phase}, step {site.step}{first}{where}")
    if outcome.status is Status.FINITE:
        return f"loss {named(outcome.loss[-1])!s:.7}" if outcome.loss else ""
    return one_line(outcome.reason.splitlines()[0]) if outcome.reason else ""


def begun(event: RunStarted, matrix: Matrix) -> str:
    """How many cells there are, how they are chosen, and how many were done before."""
    if event.search:
        kept = f", {event.kept} done before" if event.kept else ""
        return f"{matrix.name}: {event.of:,} cells, chosen by search: {event.search}{kept}"
    kept = f", {event.kept} of them done before" if event.kept else ""
    return f"{matrix.name}: {len(event.cells)} cells{kept}"


def trace_words(event: TraceStarted | TraceEnded) -> str:
    """`tracing step 1 of cell 4`, then what was found."""
    if isinstance(event, TraceStarted):
        return f"tracing step {event.step} of cell {event.cell.number}"
    return f"cell {event.cell.number}, traced: {event.text.replace('`', '')}"


class Plain:
    """One line an event, for logs and pipes."""

    def __init__(self, console: Console, matrix: Matrix) -> None:
        self.console, self.matrix = console, matrix
        self.blocked = 0

    def __call__(self, event: Event) -> None:
        """Print the event's line."""
        line = self._line(event)
        if line:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self, event: Event) -> str | None:
        if isinstance(event, RunStarted):
            return f"{begun(event, self.matrix)}; run folder {event.folder}"
        if isinstance(event, LevelBlocked):
            levels = " ".join(f"{name}={level}" for name, level in event.levels.items())
            return f"not on this machine: {levels}: {event.reason}"
        if isinstance(event, (SlotNoted, StartNoted)):
            return event.text
        if isinstance(event, CellStarted) and event.why:
            return f"next, cell {event.cell.number}: {event.why}"
        if isinstance(event, CellEnded) and event.outcome.seconds:
            more = event.left is not None and event.total is not None and event.done < event.total
            left = f", about {duration(event.left or 0.0)} left" if more else ""
            took = f"{event.outcome.seconds:.1f} s"
            words = f"{event.outcome.status.value:<11} {levels_of(event.cell, self.matrix)}  {told(event.outcome)}"
            place = event.done if event.total is None else f"{event.done}/{event.total}"
            return f"[{place}] {words}  ({took}{left})"
        if isinstance(event, (TraceStarted, TraceEnded)):
            return trace_words(event)
        if isinstance(event, RunEnded):
            return "stopped" if event.interrupted else event.why and f"the run ended: {event.why}"
        return None


class Lively:
    """A table that changes in place: what runs, the latest cells, progress, time left."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.started: dict[str, tuple[CellStarted, float]] = {}
        self.ended: list[CellEnded] = []
        self.notes: list[str] = []
        self.done, self.total, self.of = 0, 0, 0
        self.left: tuple[float, float] | None = None

    def __call__(self, event: Event) -> None:
        """Take the event in; `render` shows it."""
        if isinstance(event, RunStarted):
            self.done, self.total, self.of = event.kept, len(event.cells), event.of
            self.notes.append(f"{begun(event, self.matrix)}, run folder {event.folder}")
        elif isinstance(event, LevelBlocked):
            levels = " ".join(f"{name}={level}" for name, level in event.levels.items())
            self.notes.append(f"not on this machine: {levels}: {event.reason}")
        elif isinstance(event, (SlotNoted, StartNoted)):
            self.notes.append(event.text)
        elif isinstance(event, (TraceStarted, TraceEnded)):
            self.notes.append(trace_words(event))
        elif isinstance(event, CellStarted):
            self.started[event.cell.id] = (event, time.monotonic())
        elif isinstance(event, CellEnded):
            self.started.pop(event.cell.id, None)
            if event.outcome.seconds:
                self.ended.append(event)
            self.done = event.done
            self.left = None if event.left is None else (event.left, time.monotonic())

    def __rich__(self) -> RenderableType:
        """Notes, the latest cells, what runs now, progress."""
        table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
        for name in ("cell", *(factor.name for factor in self.matrix.factors), "status", "what", "time"):
            table.add_column(name, no_wrap=name != "what", overflow="ellipsis")
        for event in self.ended[-RECENT:]:
            table.add_row(*self._row(event))
        now = time.monotonic()
        for start, began in self.started.values():
            levels = [start.cell.levels[factor.name] for factor in self.matrix.factors]
            running, took = Text("running", "cyan"), f"{now - began:.0f} s"
            table.add_row(str(start.cell.number), *levels, running, Text(start.why), took, style="cyan")
        return Group(*(Text(note, "dim") for note in self.notes), table, self._progress(now))

    def _row(self, event: CellEnded) -> list[RenderableType]:
        levels = [event.cell.levels[factor.name] for factor in self.matrix.factors]
        status = Text(event.outcome.status.value, style_of(event.outcome.status))
        return [str(event.cell.number), *levels, status, Text(told(event.outcome)), f"{event.outcome.seconds:.1f} s"]

    def _progress(self, now: float) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        if self.of:
            return Text(f"{self.done} cells run, of {self.of:,}")
        left = "" if self.left is None else f"about {duration(max(0.0, self.left[0] - (now - self.left[1])))} left"
        grid.add_row(ProgressBar(self.total or 1, self.done, width=40), f"{self.done} of {self.total} cells", left)
        return grid


@contextmanager
def watching(console: Console, matrix: Matrix) -> Iterator[Callable[[Event], None]]:
    """A listener for a run: live on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield Plain(console, matrix)
        return
    lively = Lively(matrix)
    with Live(lively, console=console, refresh_per_second=4, transient=True):
        yield lively
    for note in lively.notes:
        console.print(Text(note, "dim"))


def show_report(console: Console, report: Report) -> None:
    """The verdict first, then the grid, the cells, the cautions and what to do next."""
    console.print()
    console.print(sentence(report.verdict, "bold"), soft_wrap=True)
    for finding in (*report.findings, *report.account):
        console.print(sentence(finding), soft_wrap=True)
    console.print()
    show_grid(console, report)
    console.print(cells_table(report, wide=console.width >= WIDE))
    if report.excerpt is not None:
        console.print(Text(f"\nthe end of the log of cell {report.excerpt.number}", "dim"), soft_wrap=True)
        for line in report.excerpt.lines[-EXCERPT:]:
            console.print(Text(f"  {line}"), soft_wrap=True)
        console.print()
    said = {caution.code for caution in report.cautions}
    for note in (*report.repairs, *(doubt for doubt in report.doubts if doubt.code not in said)):
        console.print(Text.assemble((f"{note.code}: ", "yellow"), sentence(note.text)), soft_wrap=True)
    for caution in report.cautions:
        text = Text.assemble(("caution: ", "yellow"), sentence(caution.text), " ", sentence(caution.advice, "dim"))
        console.print(text, soft_wrap=True)
    if report.next_steps:
        console.print(Text("\nnext", "bold"))
    for step in report.next_steps:
        console.print(Text.assemble("  ", sentence(str(step))), soft_wrap=True)


def show_grid(console: Console, report: Report) -> None:
    """The grid with its legend, where it can be drawn."""
    if not report.grid.rows:
        return
    legend = ", ".join(f"{mark} {meaning}" for mark, meaning in report.grid.legend.items())
    titles = (
        f"rows {report.grid.row_title}, columns {report.grid.column_title}" if report.grid.row_title else "the cells"
    )
    console.print(Text(f"{titles} ({legend})" if legend else titles, "dim"), soft_wrap=True)
    console.print(grid_table(report))
    console.print()


def sentence(text: str, style: str = "") -> Text:
    """A sentence of the report: what stands in backticks is a name or a level."""
    parts = text.split("`")
    return Text.assemble(*((part, "cyan" if index % 2 else "") for index, part in enumerate(parts)), style=style)


def grid_table(report: Report) -> Table:
    """The compact grid: one mark a cell."""
    grid = report.grid
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for label in grid.columns:
        table.add_column(escape(label), justify="center")
    for label, marks in zip(grid.rows, grid.marks, strict=True):
        table.add_row(Text(label), *(Text(mark, _mark_style(mark)) for mark in marks))
    return table


def _mark_style(mark: str) -> str:
    return {".": "green", "NaN": "bold red", "Inf": "bold red", "-": "dim", "": "dim"}.get(mark, "yellow")


def cells_table(report: Report, *, wide: bool) -> Table:
    """The cells that ran, with where they failed; of a large matrix, those that are not finite."""
    hidden = () if wide else ("loss", "norm")
    shown = [index for index, name in enumerate(report.columns) if name not in hidden]
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for name in (report.columns[index] for index in shown):
        header = name if wide or len(name) <= SHORT else f"{name[: SHORT - 1]}…"
        loose = name == "what"  # the one column that gives way; the others keep their width
        table.add_column(
            escape(header),
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if loose else 4,
            ratio=1 if loose else None,
        )
    rows = [row for row in report.rows if row.status not in (None, "unsupported")]
    rows = rows if len(rows) <= WHOLE else [row for row in rows if row.status != "finite"]
    for row in rows[:WHOLE]:
        style = style_of(Status(row.status))
        table.add_row(*(Text(row.texts[index], style if row.texts[index] == row.status else "") for index in shown))
    if len(rows) > WHOLE:
        table.caption = f"and {len(rows) - WHOLE} more in results.csv"
    return table


def plan_tables(
    matrix: Matrix, order: Sequence[Cell], blocked: Mapping[str, str], removed: Sequence[Mapping[str, str]]
) -> Iterator[RenderableType]:
    """The cells in the order of running, what this machine can't run, what is excluded."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("order", "cell", *(factor.name for factor in matrix.factors), "why"):
        table.add_column(name)
    for place, cell in enumerate(order, start=1):
        reason = blocked.get(cell.id)
        why = "baseline" if cell.levels == matrix.baseline else "likeliest to fail" if place == 2 and not reason else ""
        shown = [str(place), str(cell.number), *(cell.levels[factor.name] for factor in matrix.factors)]
        table.add_row(*shown, "can't run here" if reason else why, style="dim" if reason else "")
    yield table
    for levels in removed:
        yield Text("excluded: " + " ".join(f"{name}={level}" for name, level in levels.items()), "dim")


def search_tables(matrix: Matrix, plan: Plan, choices: Sequence[tuple[Cell, str]]) -> Iterator[RenderableType]:
    """What a search would run first, and why."""
    strength = f", strength {','.join(map(str, plan.strength))}" if plan.strategy is Strategy.ADAPTIVE else ""
    yield Text(f"chosen by search ({plan.strategy.value}{strength}); first, as long as all of them are finite:")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("order", "cell", "why", "levels other than the baseline's"):
        table.add_column(name)
    for place, (cell, why) in enumerate(choices, start=1):
        other = [f"{f.name}={cell.levels[f.name]}" for f in matrix.factors if cell.levels[f.name] != f.safe]
        table.add_row(str(place), str(cell.number), Text(why), Text(" ".join(other)))
    yield table


STATES = {"ok": "green", "warn": "yellow", "missing": "yellow"}
RUNS = {True: ("runs", "green"), False: ("can't run here", "yellow"), None: ("not tried", "dim")}


def doctor_parts(checkup: Checkup) -> Iterator[RenderableType]:
    """What the doctor says: the verdict, a row a thing, the levels of a matrix, then the mends, whole to be copied."""
    yield Text(_doctor_verdict(checkup), "bold")
    yield ""
    yield _three_columns(
        (row.state, "bold red" if row in checkup.lacking else STATES[row.state], row.name, row.found, row.means)
        for row in checkup.rows
    )
    if checkup.matrix and checkup.matrix.levels:
        yield Text(f"\nlevels of {checkup.matrix.name}", "bold")
        yield _three_columns(_level_lines(checkup.matrix))
    mends = dict.fromkeys(row.mend for row in checkup.rows if row.mend)
    if mends:
        yield Text("\nto mend", "bold")
    for mend in mends:
        names = ", ".join(row.name for row in checkup.rows if row.mend == mend)
        yield Text.assemble("  ", (names, "cyan"), f": {one_line(mend)}")


def _level_lines(matrix: Levels) -> Iterator[tuple[str, str, str, str, str]]:
    """A line a level; those of one setting of which there is the same to say are one: `batch_size=1|2|8`."""
    alike: dict[tuple[str, bool | None, str], list[str]] = {}
    for item in matrix.levels:
        alike.setdefault((item.setting, item.runs, item.why), []).append(item.level)
    for (setting, runs, why), levels in alike.items():
        yield (*RUNS[runs], f"{setting}={'|'.join(levels)}", why, "")


def _three_columns(rows: Iterable[tuple[str, str, str, str, str]]) -> Table:
    """A state in its style, a name, what is said of it, and below that what it means."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for state, style, name, said, means in rows:
        text = Text(one_line(said))
        table.add_row(Text(state, style), Text(name), text.append(f"\n{one_line(means)}", "dim") if means else text)
    return table


def _doctor_verdict(checkup: Checkup) -> str:
    matrix = checkup.matrix
    if checkup.lacking:
        return f"No cell can run here: what is missing is {' and '.join(row.name for row in checkup.lacking)}."
    if matrix is None:
        return f"Cells can run here, on {checkup.device}."
    if matrix.runnable is None:
        return f"Which cells of {matrix.name} can run here is not known: {one_line(matrix.reason)}."
    many = "All" if matrix.runnable == matrix.cells else f"{matrix.runnable or 'None'} of the"
    return f"{many} {counted(matrix.cells, 'cell')} of {matrix.name} can run here, as far as the machine goes."
