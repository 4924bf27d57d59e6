"""One command under the probe, left alone: its output untouched, its exit code kept, a diagnosis at its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from nanbisect.errors import UsageError
from nanbisect.evidence import Effect, Ending, judge
from nanbisect.outcome import Outcome, Smear, Status
from nanbisect.store import read_evidence
from nanbisect.trainers.base import FOLDER, probe_environment


@dataclass(frozen=True)
class Watched:
    """How the command ended, and what the probe saw of it. `left`: ids of processes that it left behind."""

    code: int
    outcome: Outcome
    left: tuple[int, ...] = ()


def watch(command: Sequence[str], *, steps: int | None, stop: bool, environ: Mapping[str, str]) -> Watched:
    """Run the command to its end under the probe. Raises UsageError if it can't be started.

    With `steps` it is ended after so many optimizer steps, with `stop` at the first non-finite value.
    """
    with tempfile.TemporaryDirectory(prefix="nanbisect-watch-") as name:
        folder = Path(name)
        limits = {"NANBISECT_STOP": "event" if stop else "", **({"NANBISECT_STEPS": str(steps)} if steps else {})}
        code = _run(command, {**environ, **probe_environment(folder, environ), **limits})
        left = still_running(folder)
        return Watched(code, _judged(folder, code, len(left)), left)


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
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def still_running(folder: Path) -> tuple[int, ...]:
    """Ids of processes that the command left behind: they carry the probe's folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
            if mine and process.environ().get(FOLDER) == str(folder):
                found.append(process.pid)
    return tuple(found)


def _judged(folder: Path, code: int, left: int) -> Outcome:
    """What was seen. As in a run, a command that failed by itself is never finite, and a value that was seen stands."""
    ending = Ending("exited", code if code >= 0 else None, -code if code < 0 else None, 0.0, False, left)
    return judge(replace(read_evidence(folder), ending=ending), attempt=1, seed=0, effect_of=lambda resolved: Effect())


def diagnosis(watched: Watched, command: Sequence[str]) -> tuple[str, ...]:
    """What to tell at the end: what was seen, where it arose, what a check after clipping says, what to run next."""
    outcome = watched.outcome
    lines = [f"nanbisect: {_head(outcome)}"]
    if outcome.named_suspects:
        lines.append(f"records of that batch: {', '.join(outcome.named_suspects[:16])}")
    if outcome.smear is not None:
        lines.append(_smeared(outcome.smear))
    lines += [f"{note.code}: {note.text}" for note in (*outcome.repairs, *outcome.doubts)]
    if watched.left:
        lines.append(f"still running, and watched no longer: process {', '.join(map(str, watched.left))}")
    lines += _next(outcome, command)
    return tuple(lines)


def _head(outcome: Outcome) -> str:
    steps = outcome.resolved.get("steps", len(outcome.loss))
    looked = f"finite so far, in {steps} {'step' if steps == 1 else 'steps'} that it looked at"
    if outcome.status is Status.NONFINITE:
        return f"non-finite: {outcome.reason}"
    if outcome.status is Status.FINITE:
        return looked
    return f"{looked}; then {outcome.reason}" if steps else outcome.reason


def _smeared(smear: Smear) -> str:
    said = f"a check after clipping would have blamed {smear.blamed} ({smear.bad} of {smear.numel} elements)"
    if smear.misleads:
        return f"{said}; the first gradient to arrive non-finite was {smear.first}"
    return f"{said} too: that is where the first non-finite gradient arrived"


def _next(outcome: Outcome, command: Sequence[str]) -> list[str]:
    if outcome.status is Status.NONFINITE:
        return ["next: a matrix with `trainer: command` over the settings you suspect says which of them brings it"]
    if outcome.status is Status.NO_TRAINING:
        return [
            f"next: if {Path(command[0]).name} trains in a process of its own, hand on PYTHONPATH and {FOLDER} to it, "
            "or watch that process itself: nanbisect watch -- python train.py"
        ]
    return []
