"""What a person sees: plain lines in a pipe, a live table on a terminal, the report after the run."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from nanbisect import console as show
from nanbisect.attribution import attribute
from nanbisect.events import CellEnded, CellStarted, Event, LevelBlocked, RunEnded, RunStarted, SlotNoted
from nanbisect.matrix import Factor, Matrix, expand
from nanbisect.outcome import CellResult, Note, Outcome, Site, Status
from nanbisect.report import words
from nanbisect.report.model import RunInputs, build
from nanbisect.search.values import Plan

MATRIX = Matrix(
    name="m", trainer="sft", factors=(Factor("attention", ("sdpa", "eager")), Factor("batch_size", ("1", "8")))
)
CELLS = expand(MATRIX)
SITE = Site(step=1, micro_batch=0, rank=0, phase="backward", kind="nan", parameters=("layers.1.k_proj.weight",))
BAD = Outcome(Status.NONFINITE, "nan in backward", site=SITE, loss=(3.5,), grad_norm=(float("nan"),), seconds=2.0)
GOOD = Outcome(Status.FINITE, "fine", loss=(3.5, 3.25), grad_norm=(1.0, 1.0), seconds=3.0)


def recording(width: int = 100) -> Console:
    """A terminal that keeps what it was told."""
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)


def told(console: Console) -> str:
    """What the console was told."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_say_what_ended_and_how_long_is_left() -> None:
    """One line a cell; a blocked level once, not once a cell."""
    console = recording(200)
    plain = show.Plain(console, MATRIX)
    plain(RunStarted("reports/m", CELLS, kept=1))
    plain(LevelBlocked({"attention": "flash"}, "not installed"))
    plain(CellStarted(CELLS[0], 1, "cpu0"))
    plain(CellEnded(CELLS[0], BAD, 2, 4, left=65.0))
    plain(CellEnded(CELLS[1], GOOD, 3, 4, left=None))
    plain(CellEnded(CELLS[2], Outcome(Status.UNSUPPORTED, "not installed"), 4, 4, left=0.0))
    plain(RunEnded("reports/m", interrupted=True))
    lines = told(console).splitlines()
    assert lines[0] == "m: 4 cells, 1 of them done before; run folder reports/m"
    assert lines[1] == "not on this machine: attention=flash: not installed"
    assert lines[2] == (
        "[2/4] nonfinite   attention=sdpa batch_size=1  nan in backward, step 1, first layers.1.k_proj.weight"
        "  (2.0 s, about 1 min 5 s left)"
    )
    assert lines[3] == "[3/4] finite      attention=sdpa batch_size=8  loss 3.25  (3.0 s)"
    assert lines[4:] == ["stopped"]


def test_the_live_table_shows_what_runs_what_ended_and_the_progress() -> None:
    """On a terminal."""
    lively = show.Lively(MATRIX)
    lively(RunStarted("reports/m", CELLS, kept=0))
    lively(CellStarted(CELLS[0], 1, "cpu0"))
    lively(CellEnded(CELLS[0], BAD, 1, 4, left=90.0))
    lively(CellStarted(CELLS[1], 1, "cpu0"))
    console = recording(140)
    console.print(lively)
    text = told(console)
    assert "nonfinite" in text
    assert "running" in text
    assert "1 of 4 cells" in text
    assert "left" in text


def test_a_gpu_that_is_not_used_is_said_at_once() -> None:
    """In a pipe as a line of its own, on a terminal above the table."""
    note = SlotNoted("1", "GPU 1 is left to whoever has it: ollama (process 4711)")
    console, lively = recording(140), show.Lively(MATRIX)
    show.Plain(console, MATRIX)(note)
    lively(note)
    assert lively.notes == [note.text]
    assert told(console).strip() == note.text


def test_markup_in_data_is_only_text() -> None:
    """A parameter called [red] does not paint the terminal."""
    odd = Outcome(Status.FAILED, "[bold]ValueError[/bold]: [/red] \x1b[31m", seconds=1.0)
    console = recording(200)
    show.Plain(console, MATRIX)(CellEnded(CELLS[0], odd, 1, 4, left=None))
    assert "[bold]ValueError[/bold]: [/red]" in told(console)
    assert "\x1b" not in told(console)


def report_of(statuses: tuple[Outcome, ...]) -> str:
    """The whole report as a terminal shows it."""
    results = tuple(CellResult(cell, (outcome,)) for cell, outcome in zip(CELLS, statuses, strict=True))
    inputs = RunInputs(
        matrix=MATRIX,
        results=results,
        attribution=attribute(MATRIX.factors, results),
        environment={"device": "cpu"},
        folder="m-1",
        command=("nanbisect", "run", "m.yaml"),
        matrix_path="m.yaml",
    )
    console = recording(140)
    show.show_report(console, build(inputs))
    return told(console)


def test_the_verdict_comes_first_and_without_marks() -> None:
    """Two sentences, then the grid, then the cells."""
    text = report_of((GOOD, GOOD, GOOD, BAD))
    first = text.strip().splitlines()[0]
    assert first.startswith("attention=eager together with batch_size=8 brings the NaN")
    assert "`" not in first
    assert "nanbisect rerun m-1 4" in text


def test_a_doubt_that_is_a_caution_is_said_once() -> None:
    """And a grid in which nothing needs explaining has no empty brackets."""
    odd = replace(BAD, doubts=(Note("precision_otherwise", "all parameters are float32"),))
    text = report_of((odd,) * 4)
    assert text.count("all parameters are float32") == 1
    assert "()" not in text


def test_nothing_judged_says_why() -> None:
    """And what to do about it."""
    failed = Outcome(Status.FAILED, "ValueError: no", seconds=1.0)
    text = report_of((failed,) * 4)
    assert "ValueError: no" in text
    assert "next" in text


def test_durations_read_like_a_person_says_them() -> None:
    """Seconds, minutes, hours."""
    assert [words.duration(seconds) for seconds in (0.4, 45, 200, 7500)] == ["0 s", "45 s", "3 min 20 s", "2 h 5 min"]


def test_a_search_says_what_it_runs_next_and_why() -> None:
    """Plain and live: no total, for the search says when it is enough; a reason for every cell; why it ended."""
    console, lively = Console(file=io.StringIO(), width=160), show.Lively(MATRIX)
    plain = show.Plain(console, MATRIX)
    events: list[Event] = [
        RunStarted("reports/m", CELLS[:1], kept=1, search="adaptive 3,2", of=1296),
        CellStarted(CELLS[1], 1, "cpu0", "covers 41 untried pairs"),
        CellEnded(CELLS[1], BAD, 2, None, left=None),
        CellStarted(CELLS[2], 1, "cpu0", "tells apart attention=eager from batch_size=8"),
    ]
    for event in events:
        plain(event)
        lively(event)
    live = recording(160)
    live.print(lively)
    plain(RunEnded("reports/m", interrupted=False, why="the search is complete at strength 3,2"))
    lines = told(console).splitlines()
    assert lines[0] == "m: 1,296 cells, chosen by search: adaptive 3,2, 1 done before; run folder reports/m"
    assert lines[1] == "next, cell 2: covers 41 untried pairs"
    assert lines[2].startswith("[2] nonfinite   attention=sdpa batch_size=8")
    assert lines[-1] == "the run ended: the search is complete at strength 3,2"
    shown = told(live)
    assert "tells apart attention=eager from batch_size=8" in shown
    assert "2 cells run, of 1,296" in shown


def test_the_plan_of_a_search_shows_the_first_cells_and_why() -> None:
    """The levels that are not the baseline's, so that many factors fit."""
    console = Console(file=io.StringIO(), width=120)
    first = [(CELLS[0], "control"), (CELLS[3], "covers 2 pairs")]
    for part in show.search_tables(MATRIX, Plan(strength=(2, 1)), first):
        console.print(part)
    lines = [line.split() for line in told(console).splitlines()]
    assert " ".join(lines[0]).startswith("chosen by search (adaptive, strength 2,1)")
    assert lines[-2:] == [["1", "1", "control"], ["2", "4", "covers", "2", "pairs", "attention=eager", "batch_size=8"]]
