"""Traces of cells: the failing one once more, same seed, its failing step looked at operation by operation.

A traced attempt counts for nothing: its outcome changes no verdict. What it finds is written into the outcome
of the attempt that it repeats, in one piece and at the end, so that an interrupted trace loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nanbisect.events import TraceEnded, TraceStarted
from nanbisect.evidence import Evidence
from nanbisect.matrix import Cell, Matrix
from nanbisect.origins import (
    DISAGREE,
    FROM_START,
    Traced,
    channels_alone,
    comes_and_goes,
    first_try,
    memory_words,
    origin_of,
    with_channels,
)
from nanbisect.outcome import Note, Outcome
from nanbisect.report.origins import origin_line
from nanbisect.run import Driver, Listener
from nanbisect.store import read_evidence

STEP, ALONE, DETERMINISTIC = "NANBISECT_TRACE", "NANBISECT_ALONE", "NANBISECT_DETERMINISTIC"
LEVELS = ("kernels+fill", "kernels")  # of the setting `deterministic`, and of the variable for commands
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
MEMORY = "comes_and_goes"


@dataclass(frozen=True)
class Failure:
    """A failing attempt to be traced: its folder, its outcome, and the step as the probe counts it."""

    cell: Cell
    folder: Path
    outcome: Outcome
    step: int


def failure_of(driver: Driver, cell: Cell, *, variant: bool = False) -> Failure | None:
    """The failing attempt that speaks for a cell; None if no attempt of it failed."""
    found = driver.store.failed_attempt(cell, variant=variant)
    if found is None or found[1].site is None:
        return None
    event = first_try(read_evidence(found[0]))
    return Failure(cell, *found, step=int(event["step"]) if event else found[1].site.step)


def trace(driver: Driver, failure: Failure, listener: Listener, *, matrix: Matrix | None = None) -> Traced:
    """Trace a failing attempt, and write what was found into its outcome."""
    listener(TraceStarted(failure.cell, failure.step))
    traced, evidence = _attempt(driver, failure, {STEP: str(failure.step)}, matrix)
    if traced.origin is not None and _several_channels(evidence):
        traced = replace(traced, origin=with_channels(traced.origin, _alone(driver, failure, matrix)))
    notes = [traced.note] if traced.note else []
    if not traced.same_place or comes_and_goes(driver.store.outcomes(failure.cell)):
        traced, said = _memory(driver, failure, traced, matrix)
        notes.append(Note(MEMORY, said))
    _write(driver, failure, traced, notes)
    text = origin_line(traced.origin) if traced.origin else ""
    listener(TraceEnded(failure.cell, " ".join([text, *(note.text for note in notes)]).strip()))
    return traced


def _attempt(
    driver: Driver, failure: Failure, env: Mapping[str, str], matrix: Matrix | None
) -> tuple[Traced, Evidence]:
    seed = failure.outcome.seed
    folder, ended = driver.single.aside(failure.cell, seed=seed, env=env, matrix=matrix)
    evidence = read_evidence(folder, ended)
    outcome = driver.single.judge_aside(failure.cell, folder, seed=seed, ended=ended)
    driver.store.write_outcome(folder, outcome)
    return origin_of(evidence, outcome, failure.outcome, way=FROM_START), evidence


def _several_channels(evidence: Evidence) -> bool:
    """Whether a recipe told losses by channel, and there is more than one."""
    return any(len(parts) > 1 for line in evidence.lines("step") for parts in line["channels"])


def _alone(driver: Driver, failure: Failure, matrix: Matrix | None) -> Mapping[str, str | None] | None:
    """Each channel's backward by itself, in an attempt of its own: nothing of it can touch the traced one."""
    micro = failure.outcome.site.micro_batch if failure.outcome.site else 0
    env = {ALONE: f"{failure.step}:{micro}"}
    folder, ended = driver.single.aside(failure.cell, seed=failure.outcome.seed, env=env, matrix=matrix)
    return channels_alone(read_evidence(folder, ended))


def _memory(driver: Driver, failure: Failure, traced: Traced, matrix: Matrix | None) -> tuple[Traced, str]:
    """Where a NaN comes and goes: with fresh memory filled with NaN, then with deterministic kernels alone."""
    found = []
    for level in LEVELS:
        changed, env = _deterministic(driver, failure, level)
        again, _ = _attempt(driver, changed, {**env, STEP: str(failure.step)}, matrix)
        found.append(again)
    said = memory_words(found[0].outcome, found[1].outcome)
    sure = traced.origin is None and found[0].origin is not None and found[0].same_place
    origin = found[0].origin if sure else traced.origin
    if origin is not None:
        origin = {**origin, "memory": said}
    return replace(traced, origin=origin), said


def _deterministic(driver: Driver, failure: Failure, level: str) -> tuple[Failure, Mapping[str, str]]:
    """The trainer's own setting where it has one; a command is told through the probe."""
    if "deterministic" in driver.trainer.vocabulary.settings:
        cell = failure.cell
        return replace(failure, cell=Cell(cell.number, {**cell.levels, "deterministic": level})), {}
    return failure, {DETERMINISTIC: level, **CUBLAS}


def _write(driver: Driver, failure: Failure, traced: Traced, notes: Sequence[Note]) -> None:
    kept = tuple(note for note in failure.outcome.doubts if note.code not in (DISAGREE, MEMORY, *_codes(notes)))
    outcome = replace(failure.outcome, origin=traced.origin, doubts=(*kept, *notes))
    driver.store.write_outcome(failure.folder, outcome)


def _codes(notes: Sequence[Note]) -> tuple[str, ...]:
    return tuple(note.code for note in notes)
