"""One command under the probe, left alone: its output untouched, its exit code kept, a diagnosis at its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from nanbisect.errors import UsageError
from nanbisect.evidence import Effect, Ending, Evidence
from nanbisect.judging import judge, unseen
from nanbisect.matrix import Cell
from nanbisect.outcome import CellResult, Outcome, Site, Smear, Status
from nanbisect.report.places import of_what, places
from nanbisect.report.words import counted
from nanbisect.store import read_evidence
from nanbisect.trainers.base import FOLDER, probe_environment
from nanbisect.trainers.starters import starter_for

PASSED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""What a scheduler or a container sends to its first process is meant for the training."""
SHOWN = 16  # records
LATE = 50  # steps; a matrix would take long to get there in every cell


@dataclass(frozen=True)
class Watched:
    """How the command ended, and what the probe saw of it.

    `steps` and `backwards` are those of the rank with the most; `harmless`: the loss was non-finite and every gradient
    of that step finite; `spoiled` is the first step after which weights or optimizer state were, or may have been,
    non-finite; `armed`: some process of it had torch and the probe;
    `left`: ids of processes that it left behind; `so_far`: all was finite until it ended, in whatever way; `unseen`:
    what that does not cover.
    """

    code: int
    outcome: Outcome
    steps: int = 0
    backwards: int = 0
    harmless: bool = False
    spoiled: int | None = None
    armed: bool = True
    left: tuple[int, ...] = ()
    so_far: bool = False
    unseen: str = ""


def watch(command: Sequence[str], *, steps: int | None, stop: bool, environ: Mapping[str, str]) -> Watched:
    """Run the command to its end under the probe. Raises UsageError if it can't be started.

    With `steps` it is ended after so many optimizer steps, with `stop` at the first non-finite value.
    """
    with tempfile.TemporaryDirectory(prefix="nanbisect-watch-") as name:
        return watch_in(Path(name), command, environ=environ, limits=probe_limits(steps=steps, stop=stop))


def watch_in(folder: Path, command: Sequence[str], *, environ: Mapping[str, str], limits: Mapping[str, str]) -> Watched:
    """Run the command with the probe's events in that folder. `limits`: variables for the probe."""
    began = time.monotonic()
    code = _run(command, {**environ, **probe_environment(folder, environ), **limits})
    return watched(folder, code, time.monotonic() - began, still_running(folder))


def probe_limits(*, steps: int | None, stop: bool) -> dict[str, str]:
    """The variables that tell the probe when the command ends, and that it may run for days."""
    return {"NANBISECT_STOP": "event" if stop else "", **({"NANBISECT_STEPS": str(steps)} if steps else {})}


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """The exit code; Ctrl-C goes to the command, which decides what becomes of it."""
    try:
        process = subprocess.Popen(command, env=dict(env))
    except FileNotFoundError as error:
        raise UsageError(
            f"the command {command[0]!r} was not found\ntry: its full path, or `python script.py`"
        ) from error
    except OSError as error:
        raise UsageError(
            f"the command {command[0]!r} can't be started: {error.strerror}\n"
            "try: `python script.py` for a script, or chmod +x for a program"
        ) from error
    with passing_on(process):
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


@contextlib.contextmanager
def passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals for the training reach it, and the diagnosis is still given; what was ignored stays so."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in PASSED_ON if hasattr(signal, name)]
        for number in (number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN):
            before[number] = signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def still_running(folder: Path) -> tuple[int, ...]:
    """Ids of processes that the command left behind: they carry the probe's folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
            if mine and process.environ().get(FOLDER) == str(folder):
                found.append(process.pid)
    return tuple(found)


def watched(folder: Path, code: int, seconds: float = 0.0, left: tuple[int, ...] = ()) -> Watched:
    """What was seen. As in a run, a command that failed by itself is never finite, and a value that was seen stands."""
    ending = Ending("exited", code if code >= 0 else None, -code if code < 0 else None, seconds, False, len(left))
    evidence = replace(read_evidence(folder), ending=ending)
    outcome = _judged(evidence)
    last, bad = evidence.events("exit"), evidence.events("nonfinite")
    return Watched(
        code,
        outcome,
        steps=max([*(line["steps"] for line in last), *(line["step"] for line in evidence.events("step"))], default=0),
        backwards=max((line["backwards"] for line in last), default=0),
        harmless=_only_the_loss(evidence, outcome),
        spoiled=min(map(_earliest, filter(_spoils, bad)), default=None),
        armed=evidence.armed,
        left=left,
        so_far=_judged(replace(evidence, ending=replace(ending, code=0, signal=None))).status is Status.FINITE,
        unseen=unseen(evidence),
    )


def _earliest(event: Mapping[str, Any]) -> int:
    """The first step in which it may have arisen."""
    return int(event["step"] if event.get("since") is None else event["since"] + 1)


def _judged(evidence: Evidence) -> Outcome:
    return judge(evidence, attempt=1, seed=0, effect_of=lambda resolved: Effect())


def _spoils(event: Mapping[str, Any]) -> bool:
    """Whether weights or state were found bad after the step. What came by reduction is then told as such, with the
    gradients that brought it; without any tensor it was seen in the norm, before the step."""
    return event["phase"] == "optimizer" or (event["phase"] == "reduce" and bool(event["tensors"]))


def _only_the_loss(evidence: Evidence, outcome: Outcome) -> bool:
    """Whether gradients were seen in the step of a non-finite loss, all of them, and none of them was bad.

    Of a loss that the script did not hand to backward there are none: those of its step are of another batch.
    """
    site = outcome.site
    kept = any(not line.get("backward", True) for line in evidence.events("nonfinite"))
    if site is None or site.phase != "loss" or kept or evidence.events("partial"):
        return False
    seen = [line for line in evidence.events("step") if line["step"] == site.step]
    return bool(seen) and all(line["gradients"] and not line["bad"] for line in seen)


# what to tell ----------------------------------------------------------------------------------


def diagnosis(watched: Watched, command: Sequence[str]) -> tuple[str, ...]:
    """What to tell at the end: what was seen, where it arose, what a check after clipping says, what to run next."""
    outcome = watched.outcome
    lines = [f"nanbisect: {_head(watched)}"]
    if outcome.status is Status.NONFINITE:
        lines += _about_the_event(watched)
    lines += [f"{note.code}: {note.text}" for note in (*outcome.repairs, *outcome.doubts)]
    if watched.left:
        lines.append(f"still running, and watched no longer: process {', '.join(map(str, watched.left))}")
    lines += _next(watched, command)
    return tuple(lines)


def _head(watched: Watched) -> str:
    outcome = watched.outcome
    looked = f"finite so far, in {counted(watched.steps, 'step')} ({counted(watched.backwards, 'backward pass')})"
    looked += watched.unseen
    if outcome.status is Status.NONFINITE:
        (place,) = places((CellResult(Cell(1, {}), (outcome,)),))
        return f"non-finite: {place.kind} {place.text}"
    if outcome.status is Status.FINITE:
        return looked
    return f"{looked}; then {outcome.reason}" if watched.so_far else outcome.reason


def _about_the_event(watched: Watched) -> Iterator[str]:
    outcome = watched.outcome
    site, smear = outcome.site, outcome.smear
    if site is not None and site.phase == "optimizer":
        yield "no loss and no gradient had been non-finite before: the optimizer's own arithmetic made it"
    if watched.harmless:
        yield "every gradient of that step was finite all the same"
    if outcome.named_suspects:
        yield _records(outcome)
    if smear is not None:
        yield _smeared(smear)
    if watched.spoiled is not None:
        are = "are" if site is None or site.since is None else "may be"
        held = f"the weights or the optimizer's state {are} non-finite"
        yield f"after step {watched.spoiled} {held}: go back to before it"


def _smeared(smear: Smear) -> str:
    said = f"a check after clipping would have blamed {smear.blamed} ({smear.bad} of {smear.numel} elements)"
    if smear.misleads:
        return f"{said}; the first gradient to arrive non-finite was {smear.first}"
    return f"{said} too: that is where the first non-finite gradient arrived"


def _records(outcome: Outcome) -> str:
    """`records of that batch on rank 1: r5, r7`."""
    records = outcome.named_suspects
    what = f"that {of_what(outcome.site, 'batch') if outcome.site else 'step'}"
    if outcome.site and outcome.site.since is not None:
        what = _since(outcome.site)
    rest = f" and {len(records) - SHOWN} more" if len(records) > SHOWN else ""
    rows = " (rows of the dataset that the data loader reads, from 0)" if records[0].startswith("row ") else ""
    return f"records of {what}: {', '.join(records[:SHOWN])}{rest}{rows}"


def _since(site: Site) -> str:
    """`step 80`, or `steps 71 to 80`: all in which it may have arisen."""
    return f"step {site.step}" if site.since is None else f"steps {site.since + 1} to {site.step}"


def _ended_first(watched: Watched) -> bool:
    """Whether a command that had the probe failed before it trained."""
    awake = not any(doubt.code == "probe_error" for doubt in watched.outcome.doubts)
    return watched.outcome.status is Status.FAILED and watched.code > 0 and awake and not watched.steps


def _nothing_seen(watched: Watched, program: str) -> str:
    if watched.armed and watched.code:
        return f"next: {program} ended with code {watched.code} before it trained; what it printed says why"
    if watched.armed:
        return (
            f"next: {program} did import torch and called no backward: look whether it trains at all, or in a process "
            "elsewhere (a container, ssh, another machine)"
        )
    return (
        f"next: if {program} trains in a process of its own, hand on PYTHONPATH and {FOLDER} to it, "
        "or watch that process itself: nanbisect watch -- python train.py"
    )


def _next(watched: Watched, command: Sequence[str]) -> Iterator[str]:
    outcome = watched.outcome
    if outcome.status is Status.NO_TRAINING or _ended_first(watched):
        yield _nothing_seen(watched, Path(command[0]).name)
    if outcome.status is not Status.NONFINITE:
        return
    site = outcome.site
    step = site.step if site else 1
    if site and step > LATE:
        yield (
            f"next: it came late. Put the records of {_since(site)} first in the data and watch a few steps; "
            "if they are finite, watch from the last checkpoint before it"
        )
    when, steps = ("then", "") if step > LATE else ("next", f" (with `steps: {step}`)")
    name = starter_for(command)
    yield f"{when}: `nanbisect init {name}` writes a matrix{steps} to find the setting that brings it"
