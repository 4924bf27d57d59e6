"""One command under the probe, left alone: its output untouched, its exit code kept, a diagnosis at its end."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nanbisect.errors import UsageError
from nanbisect.evidence import Effect, Ending, judge
from nanbisect.outcome import Outcome, Status
from nanbisect.store import read_evidence
from nanbisect.trainers.base import probe_environment


@dataclass(frozen=True)
class Watched:
    """How the command ended, and what the probe saw of it."""

    code: int
    outcome: Outcome


def watch(command: Sequence[str], *, steps: int | None, stop: bool, environ: Mapping[str, str]) -> Watched:
    """Run the command to its end under the probe. Raises UsageError if it can't be started.

    With `steps` it is ended after so many optimizer steps, with `stop` at the first non-finite value.
    """
    with tempfile.TemporaryDirectory(prefix="nanbisect-watch-") as name:
        folder = Path(name)
        code = _run(command, {**environ, **probe_environment(folder, environ), **probe_limits(steps=steps, stop=stop)})
        return Watched(code, _judged(folder, code))


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
        raise UsageError(f"the command {command[0]!r} can't be started: {error.strerror}") from error
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _judged(folder: Path, code: int) -> Outcome:
    """What was seen, whatever the command's own exit code: that is the command's affair. A signal counts."""
    ending = Ending("exited", 0 if code >= 0 else None, -code if code < 0 else None, 0.0, False)
    return judge(replace(read_evidence(folder), ending=ending), attempt=1, seed=0, effect_of=lambda resolved: Effect())


def diagnosis(watched: Watched, command: Sequence[str]) -> tuple[str, ...]:
    """What to tell at the end: what was seen, where it arose, what a check after clipping says, what to run next."""
    outcome = watched.outcome
    lines = [f"nanbisect: {_head(outcome)}"]
    if outcome.suspects:
        lines.append(f"records of that batch: {', '.join(outcome.suspects[:16])}")
    if outcome.smear is not None and outcome.smear.misleads:
        smear = outcome.smear
        lines.append(
            f"a check after clipping would have blamed {smear.blamed} ({smear.bad} of {smear.numel} elements); "
            f"the first gradient to arrive non-finite was {smear.first}"
        )
    lines += [f"{note.code}: {note.text}" for note in (*outcome.repairs, *outcome.doubts)]
    lines += _next(outcome, command)
    return tuple(lines)


def _head(outcome: Outcome) -> str:
    if outcome.status is Status.NONFINITE:
        return f"non-finite: {outcome.reason}"
    if outcome.status is Status.FINITE:
        return f"finite so far, in {len(outcome.loss)} steps that it looked at"
    return outcome.reason


def _next(outcome: Outcome, command: Sequence[str]) -> list[str]:
    if outcome.status is Status.NONFINITE:
        return ["next: a matrix with `trainer: command` over the settings you suspect says which of them brings it"]
    if outcome.status is Status.NO_TRAINING:
        return [
            f"next: {Path(command[0]).name} may drop PYTHONPATH (a container, ssh, sudo, `python -I`), run another "
            "Python without torch, or not train at all"
        ]
    return []
