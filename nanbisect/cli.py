"""The commands: parse, call one plain function, render, return a code. Heavy imports wait until they are used."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from nanbisect import __version__
from nanbisect.errors import NanbisectError

if TYPE_CHECKING:
    from nanbisect.matrix_file import Overrides

app = typer.Typer(
    name="nanbisect",
    help="Says which training setting brings back the NaN, and where it starts.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
INTERRUPTED = 130
BUG = 70  # EX_SOFTWARE
REPORTS = Path("reports")


class Format(str, Enum):
    """Renderings of a report."""

    md = "md"
    json = "json"
    csv = "csv"


class StrategyName(str, Enum):
    """How the cells to run are chosen."""

    grid = "grid"
    adaptive = "adaptive"
    first_cause = "first-cause"


MatrixFile = Annotated[Path, typer.Argument(metavar="MATRIX", help="The experiment file (YAML).", show_default=False)]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, its name below reports/, or `latest`.")]
CellName = Annotated[str, typer.Argument(metavar="CELL", help="Its number in the table, or a part of its id.")]
ModelPath = Annotated[
    str | None, typer.Option("--model-path", help="A local folder or a hub id, instead of the matrix's model.")
]
TrainJsonl = Annotated[str | None, typer.Option("--train-jsonl", help="A data file instead of the matrix's data.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="K=V", help="Fix a setting. Repeat for more.")]
Factors = Annotated[
    list[str] | None,
    typer.Option("--factor", metavar="K=A|B", help="Make or replace a factor; the first level is the safe one."),
]
Steps = Annotated[int | None, typer.Option("--steps", help="Optimizer steps of the cell with the largest batch.")]
Repeat = Annotated[int | None, typer.Option("--repeat", help="Attempts a cell, each with its own seed.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of attempt 1.")]
Timeout = Annotated[str | None, typer.Option("--timeout", help="Of one attempt: 90s, 10m, 2h.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cuda or cpu.")]
Gpus = Annotated[str | None, typer.Option("--gpus", help="GPUs to use, such as 0,2; all visible ones by default.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Cells at once on a CPU.")]
Cold = Annotated[bool, typer.Option("--cold", help="Start a Python of its own for every attempt.")]
NoCheck = Annotated[
    bool, typer.Option("--no-check", help="Start a command warm without running one cell both ways first.")
]
Strategy = Annotated[
    StrategyName | None,
    typer.Option(
        "--strategy", help="Which cells to run: all (grid, up to 64 by default), as a search asks, or up to a cause."
    ),
]
Strength = Annotated[
    str | None,
    typer.Option(
        "--strength",
        metavar="T[,U]",
        help="Causes of up to T factors, each seen with every U other levels; 3,2 by default.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="CELLS|TIME", help="The most attempts (60), or no new ones after a time (2h)."),
]
FinishGrid = Annotated[bool, typer.Option("--finish-grid", help="After the search, run the rest of the grid.")]
Keep = Annotated[
    bool, typer.Option("--keep-model", help="Train cells one after another in a process that keeps its loaded model.")
]
NoTrace = Annotated[
    bool, typer.Option("--no-trace", help="Do not trace a failing cell of every cause when all cells are done.")
]
Out = Annotated[
    Path | None, typer.Option("--out", help="The run folder itself, instead of reports/<matrix>-<date>-<time>.")
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Says which training setting brings back the NaN, and where it starts."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def run(  # noqa: PLR0913 - a command's options are its parameters
    matrix: MatrixFile,
    model_path: ModelPath = None,
    train_jsonl: TrainJsonl = None,
    set_: Sets = None,
    factor: Factors = None,
    steps: Steps = None,
    repeat: Repeat = None,
    seed: Seed = None,
    timeout: Timeout = None,
    device: Device = None,
    gpus: Gpus = None,
    jobs: Jobs = 1,
    cold: Cold = False,
    no_check: NoCheck = False,
    strategy: Strategy = None,
    strength: Strength = None,
    budget: Budget = None,
    finish_grid: FinishGrid = False,
    keep_model: Keep = False,
    no_trace: NoTrace = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --out, or with the latest run of this matrix.")
    ] = False,
    out: Out = None,
) -> None:
    """Run the cells of a matrix and say which settings bring the NaN.

    Up to 64 cells all of them run; beyond that a search chooses which (see --strategy).

    Exit code: 0 all judged and finite, 1 non-finite found, 2 usage or matrix error, 3 something was not
    judged, 130 interrupted (1 wins over 3).
    """
    from nanbisect import app as application
    from nanbisect.choosing import SearchFlags

    overrides = _overrides(
        model_path, train_jsonl, set_, factor, steps=steps, repeat=repeat, seed=seed, timeout=timeout, device=device
    )
    occasion = application.occasion(
        _argv(), matrix, gpus=gpus, jobs=jobs, cold=cold, check=not no_check, keep=keep_model, trace=not no_trace
    )
    flags = SearchFlags(strategy and strategy.value, strength, budget, finish_grid)
    _finish(lambda: application.run(matrix, overrides, occasion, flags, out=out, resume=resume, reports=REPORTS))


@app.command()
def plan(  # noqa: PLR0913 - a command's options are its parameters
    matrix: Annotated[Path | None, typer.Argument(metavar="MATRIX", show_default=False)] = None,
    model_path: ModelPath = None,
    train_jsonl: TrainJsonl = None,
    set_: Sets = None,
    factor: Factors = None,
    steps: Steps = None,
    device: Device = None,
    strategy: Strategy = None,
    strength: Strength = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a matrix file, for editors.")
    ] = False,
) -> None:
    """Show the cells, their order, what is excluded and what this machine can't run; of a search, what comes first."""
    from nanbisect import app as application
    from nanbisect.choosing import SearchFlags

    if schema:
        _finish(lambda: typer.echo(application.schema()))
    if matrix is None:
        raise typer.BadParameter("a matrix file is needed; `nanbisect init` writes one", param_hint="MATRIX")
    overrides = _overrides(model_path, train_jsonl, set_, factor, steps=steps, device=device)
    flags = SearchFlags(strategy and strategy.value, strength)
    _finish(lambda: application.plan(matrix, overrides, application.occasion(_argv(), matrix), flags))


@app.command()
def init(
    preset: Annotated[str | None, typer.Argument(metavar="PRESET", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="PRESET.yaml by default; - prints it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a first matrix for a trainer, commented and ready to edit. Without PRESET, list them."""
    from nanbisect import app as application

    _finish(lambda: application.init(preset, out=out, force=force))


@app.command()
def rerun(
    run: RunName,
    cell: CellName,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Attempts, each with the next seed.")] = 1,
    with_: Annotated[
        list[str] | None, typer.Option("--with", metavar="K=V", help="Change a setting for this attempt.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Find the operation, line and channel of the failing step that made it.")
    ] = False,
) -> None:
    """Run one cell again, with its output, and say whether it ended the same way at the same place.

    The same seed as the attempt it repeats. Exit codes as `run`.
    """
    from nanbisect import app as application

    changes = tuple(with_ or ())
    _finish(lambda: application.rerun(run, cell, repeat=repeat, changes=changes, trace=trace, reports=REPORTS))


@app.command()
def report(
    run: RunName,
    format_: Annotated[Format, typer.Option("--format", help="md, json or csv.")] = Format.md,
    redact: Annotated[bool, typer.Option("--redact/--no-redact", help="Replace names, paths and secrets.")] = True,
) -> None:
    """Print a run's report, built again from its files."""
    from nanbisect import app as application

    _finish(lambda: typer.echo(application.report(run, format_.value, redact=redact, reports=REPORTS), nl=False))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def watch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The training command, unmodified.")],
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="End it after so many optimizer steps.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End it at the first non-finite value.")] = False,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Then start it once more, for its failing step alone, and find the operation."),
    ] = False,
    json_: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write what was seen as JSON.")] = None,
) -> None:
    """Run one training command under the probe, its output untouched, and say where a NaN first arose.

    The exit code is the command's own.
    """
    from nanbisect import app as application

    _finish(lambda: application.watch(tuple(command), steps=steps, stop=stop, trace=trace, json_file=json_))


@app.command()
def doctor(
    matrix: Annotated[
        Path | None, typer.Argument(metavar="MATRIX", help="Say it for each level of this matrix.", show_default=False)
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Another Python than this one, such as a trainer's.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Try what this machine can run: torch, GPUs, attention kernels, packages, Slurm, disk; and say what to mend.

    Exit code: 0 Python, torch and a device are there (and some cell of the matrix can run), 1 not, 2 bad input.
    """
    from nanbisect import app as application

    _finish(lambda: application.doctor(matrix, python=python, as_json=json_, reports=REPORTS))


def _overrides(
    model: str | None, data: str | None, sets: list[str] | None, factors: list[str] | None, **others: Any
) -> Overrides:
    from nanbisect import app as application

    return application.overrides(model, data, tuple(sets or ()), tuple(factors or ()), **others)


def _argv() -> tuple[str, ...]:
    return ("nanbisect", *sys.argv[1:])


def _finish(call: Callable[[], int | None]) -> NoReturn:
    """End a command with its code; errors become one message; no traceback reaches a user."""
    try:
        code = call() or 0
    except NanbisectError as error:
        typer.echo(f"nanbisect: {error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise typer.Exit(code)


def main() -> None:
    """The console script. A bug of ours leaves its traceback in a file, not on the user's screen."""
    try:
        app()
    except Exception as error:  # noqa: BLE001 - the last resort
        with tempfile.NamedTemporaryFile("w", prefix="nanbisect-bug-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
        typer.echo(f"nanbisect: this is a bug in nanbisect: {type(error).__name__}: {error}", err=True)
        typer.echo(f"try: report it with {file.name}; what a run has finished is kept, --resume goes on", err=True)
        sys.exit(BUG)
