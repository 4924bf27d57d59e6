"""Cells worth running again: a failing one, and its nearest finite neighbour; and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nanbisect.attribution import Cause, Finding
from nanbisect.cells import MOST_LISTED
from nanbisect.matrix import Matrix, Setting
from nanbisect.neutrality import listed
from nanbisect.outcome import CellResult, Status
from nanbisect.report.inputs import NOT_RUN, RunInputs, holds
from nanbisect.report.search import SearchSummary
from nanbisect.report.verdict import known, not_varied
from nanbisect.report.words import code, counted, one_line
from nanbisect.search.values import Strategy
from nanbisect.suspects import quick_levels

MORE_STEPS = 10
SHOWN_DECIDING = 3


@dataclass(frozen=True)
class Example:
    """One cell to run again. `differs` are the factors in which it differs from the failing cell beside it.

    `settings` are its levels and the settings held constant, as `k=v`: all that is needed to repeat it by
    hand, without the run folder.
    """

    number: int
    status: str
    levels: Mapping[str, str]
    command: str
    settings: tuple[str, ...]
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A failing cell and its nearest finite neighbour, where there is one."""

    failing: Example
    neighbour: Example | None


@dataclass(frozen=True)
class Step:
    """Something to do next; `command` is ready to paste, or empty."""

    text: str
    command: str = ""

    def __str__(self) -> str:
        return f"{self.text.rstrip('.')}: {code(self.command)}" if self.command else self.text


def pair_of(inputs: RunInputs, levels: Mapping[str, Sequence[str]], witnesses: Sequence[int] = ()) -> Pair | None:
    """The first failing cell that holds these levels (and no other cause, where possible), with its neighbour."""
    matching = [result for result in inputs.failing if holds(result.cell, levels)]
    others = [cause for cause in known(inputs) if cause.levels != levels]
    only = [result for result in matching if not any(holds(result.cell, c.levels) for c in others)]
    if not matching:
        return None
    failing = (only or matching)[0]
    near = _nearest(failing, [r for r in inputs.finite if r.cell.number not in inputs.attribution.strangers], witnesses)
    beside = _example(inputs, near, _differing(failing, near)) if near else None
    return Pair(_example(inputs, failing), beside)


def pair_of_cause(inputs: RunInputs, cause: Cause) -> Pair | None:
    """The pair that shows a cause."""
    return pair_of(inputs, cause.levels, cause.witnesses)


def _nearest(failing: CellResult, finite: Sequence[CellResult], witnesses: Sequence[int]) -> CellResult | None:
    """The finite cell that differs in the fewest factors; of these a witness, of these the first."""

    def distance(result: CellResult) -> tuple[int, bool, int]:
        number = result.cell.number
        return len(_differing(failing, result)), number not in witnesses, number

    return min(finite, key=distance, default=None)


def _differing(one: CellResult, other: CellResult) -> tuple[str, ...]:
    return tuple(name for name, level in one.cell.levels.items() if other.cell.levels.get(name) != level)


def _example(inputs: RunInputs, result: CellResult, differs: tuple[str, ...] = ()) -> Example:
    cell = result.cell
    settings = {**inputs.matrix.settings, **cell.levels}
    return Example(
        number=cell.number,
        status=result.status.value if result.status else NOT_RUN,
        levels=cell.levels,
        command=rerun(inputs, cell.number),
        settings=tuple(f"{name}={level}" for name, level in settings.items()),
        differs=differs,
    )


# commands


def rerun(inputs: RunInputs, number: int) -> str:
    """The command that runs one cell of this run again. A run with `--out` may be anywhere."""
    folder = _option(own_command(inputs), "--out") or inputs.folder
    return quoted("nanbisect", "rerun", folder, str(number))


def resume(inputs: RunInputs) -> str:
    """The command that goes on with this run."""
    command = without(own_command(inputs), "--resume")
    out = () if _option(command, "--out") else ("--out", f"reports/{inputs.folder}")
    return quoted(*command, "--resume", *out)


def anew(inputs: RunInputs, *flags: str) -> str:
    """The command that makes a new run like this one, with other flags."""
    command = without(without(own_command(inputs), "--resume"), "--out", values=1)
    return quoted(*command, *flags)


def own_command(inputs: RunInputs) -> tuple[str, ...]:
    """The command that made this run."""
    return inputs.command or ("nanbisect", "run", inputs.matrix_path)


def quoted(*words: str) -> str:
    """A command line for a POSIX shell, on one line."""
    return one_line(shlex.join(words))


def without(command: Sequence[str], option: str, *, values: int = 0) -> tuple[str, ...]:
    """The command without an option and its values, however it was written."""
    kept: list[str] = []
    skip = 0
    for word in command:
        if skip:
            skip -= 1
        elif word == option:
            skip = values
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return tuple(kept)


def _without_sets(command: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The command without `--set` of these settings: they are to be varied now."""
    kept: list[str] = []
    for word in command:
        fixed = word.removeprefix("--set=") if word.startswith("--set=") or (kept and kept[-1] == "--set") else ""
        if fixed.partition("=")[0] in names:
            if kept and kept[-1] == "--set":
                kept.pop()
        else:
            kept.append(word)
    return tuple(kept)


def _option(command: Sequence[str], option: str) -> str | None:
    """The value of an option in a command."""
    for word, following in zip(command, (*command[1:], ""), strict=True):
        if word == option:
            return following or None
        if word.startswith(f"{option}="):
            return word.partition("=")[2] or None
    return None


# next steps


def next_steps(inputs: RunInputs, pairs: Sequence[Pair]) -> tuple[Step, ...]:
    """What to do with this finding, the most useful first."""
    finding = inputs.attribution.finding
    steps: list[Step] = []
    unjudged = [r for r in inputs.ordered if r.outcome and not r.outcome.judged and r.status is not Status.UNSUPPORTED]
    if unjudged and finding is not Finding.NOTHING_JUDGED:
        text = f"Make the cells that were not judged run; the log of cell {unjudged[0].cell.number} says what ended it."
        steps.append(Step(text, rerun(inputs, unjudged[0].cell.number)))
    if finding is Finding.NOTHING_FAILED:
        steps += _to_reproduce(inputs)
    elif finding is Finding.UNDECIDED:
        steps += _to_decide(inputs)
    elif finding is Finding.NOTHING_JUDGED:
        steps += _to_judge(inputs)
    steps += _to_see(pairs)
    if inputs.search:
        steps += _to_search(inputs, inputs.search)
    elif inputs.counts.get(NOT_RUN):
        steps.append(Step("Run the cells that were not run.", resume(inputs)))
    return tuple(steps)


def _to_search(inputs: RunInputs, search: SearchSummary) -> Iterator[Step]:
    """Go on with a search that did not come to its end; run the rest of a grid that is not large."""
    known, command = search.account, own_command(inputs)
    if inputs.interrupted or (search.plan.strategy is Strategy.ADAPTIVE and (known.pending or known.open)):
        longer = replace(inputs, command=without(command, "--budget", values=1))
        yield Step("Go on with the search.", resume(longer))
    elif search.plan.strategy is Strategy.FIRST_CAUSE:
        other = (*without(command, "--strategy", values=1), "--strategy", "adaptive")
        yield Step("Look for every cause; what was run counts.", resume(replace(inputs, command=other)))
    elif not search.whole and known.of_cells <= MOST_LISTED:
        rest = counted(known.of_cells - known.cells, "cell")
        again = replace(inputs, command=(*without(command, "--finish-grid"), "--finish-grid"))
        yield Step(f"Run the {rest} that the search had no need of, for the proof.", resume(again))


def _to_see(pairs: Sequence[Pair]) -> Iterator[Step]:
    for pair in pairs[:1]:
        yield Step(f"See the failure again in cell {pair.failing.number}.", pair.failing.command)
        if pair.neighbour:
            differs = listed([code(name) for name in pair.neighbour.differs])
            text = f"Compare it with cell {pair.neighbour.number}, which is finite and differs only in {differs}."
            yield Step(text, pair.neighbour.command)


def _to_decide(inputs: RunInputs) -> Iterator[Step]:
    numbers = sorted({number for cause in inputs.attribution.causes for number in cause.deciding})
    tried = {result.cell.number for result in inputs.results if result.status is not None}
    for number in [number for number in numbers if number in tried][:SHOWN_DECIDING]:
        text = f"Cell {number} would help to tell the combinations apart, once it can be judged."
        yield Step(text, rerun(inputs, number))


def _to_judge(inputs: RunInputs) -> Iterator[Step]:
    first = inputs.baseline or next(iter(inputs.ordered), None)
    if first is not None and first.status is not None:
        text = f"Make cell {first.cell.number} run first; its log says what ended it."
        yield Step(text, rerun(inputs, first.cell.number))


def _to_reproduce(inputs: RunInputs) -> Iterator[Step]:
    matrix = inputs.matrix
    longer = replace(inputs, command=without(own_command(inputs), "--steps", values=1))
    yield Step("Train longer.", anew(longer, "--steps", str(matrix.steps * MORE_STEPS)))
    yield from _to_vary(inputs)
    other = "other records than these" if matrix.records or matrix.skip_records else "more or other records"
    order = "in the data order of the run that failed"
    if inputs.vocabulary.commands:
        yield Step(f"Give the command {other}, {order}.")
    else:
        yield Step(f"Use {other} (`records` and `skip_records` in the matrix), {order}.")
    alone = "" if inputs.vocabulary.commands else ", one process a cell,"
    yield Step(
        f"Look at what else differs from the run that failed: this one used {one_line(inputs.device)}{alone} and the "
        "settings listed here."
    )


def _to_vary(inputs: RunInputs) -> Iterator[Step]:
    """Suspects that the matrix leaves alone: as factors, or first as settings of the command."""
    known = inputs.vocabulary.settings
    suspects = not_varied(inputs)
    levels = {name: _levels(inputs.matrix, known[name]) for name in suspects if name in known}
    ready = {name: texts for name, texts in levels.items() if len(texts) > 1}
    if ready:
        flags = [part for name, texts in ready.items() for part in ("--factor", f"{name}={'|'.join(texts)}")]
        text = f"Vary what this matrix leaves alone: {listed([code(name) for name in ready])}."
        free = replace(inputs, command=_without_sets(own_command(inputs), tuple(ready)))
        yield Step(text, anew(free, *flags))
    missing = [code(name) for name in suspects if name not in known]
    if missing:
        yield Step(f"Map under `flags` what the command takes of {listed(missing)}, and make it a factor.")


def _levels(matrix: Matrix, setting: Setting) -> tuple[str, ...]:
    """Levels to try, with the one that the matrix holds constant first."""
    own = matrix.settings.get(setting.name)
    usual = quick_levels(setting.name, setting)
    return tuple(dict.fromkeys((own, *usual))) if own else usual
