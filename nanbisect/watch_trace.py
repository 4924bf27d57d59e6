"""`watch --trace`: a command under the probe, and once more for its failing step, looked at operation by operation.

The first start is the user's own, untouched; at the first event the probe writes a capsule of the step. The
second plays that back, so that a failure at step 400 costs one step. Where there is no capsule, or the step
does not fail in the replay, the command starts from its beginning and is traced from just before.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from nanbisect import ranks
from nanbisect.evidence import Evidence
from nanbisect.origins import FROM_START, REPLAY, Traced, first_try, origin_of
from nanbisect.outcome import Outcome, Status
from nanbisect.report.origins import plain_lines
from nanbisect.report.words import counted
from nanbisect.store import LOG, read_evidence
from nanbisect.trainers.base import probe_environment
from nanbisect.trainers.command import NO_TRACKERS
from nanbisect.watch import Watched, diagnosis, passing_on, probe_limits, still_running, watch_in, watched

SOON = 600.0  # seconds of a run that is made again where its replay did not fail
GRACE = 5.0
BEFOREHAND = (
    "nanbisect: with --trace this command is started once more when it has ended, if a value turned non-finite: for "
    "the failing step alone, without trackers. What it writes at its start it writes again"
)

Tell = Callable[[str], None]


def watch(command: Sequence[str], *, steps: int | None, stop: bool, environ: Mapping[str, str], tell: Tell) -> Watched:
    """Run the command, tell the diagnosis, trace its failing step and tell that. Raises UsageError as `watch.watch`.

    The code stays that of the first start.
    """
    tell(BEFOREHAND)
    with tempfile.TemporaryDirectory(prefix="nanbisect-watch-") as name:
        first, capsule = Path(name, "first"), Path(name, "capsule")
        first.mkdir()
        limits = {**probe_limits(steps=steps, stop=stop), "NANBISECT_CAPSULE": str(capsule)}
        seen = watch_in(first, command, environ=environ, limits=limits)
        for line in diagnosis(seen, command):
            tell(line)
        if seen.outcome.status is not Status.NONFINITE or seen.outcome.site is None:
            return seen
        try:
            traced = _Again(command, environ, Path(name), seen.outcome, tell).trace(read_evidence(first), capsule)
        except KeyboardInterrupt:
            tell("nanbisect: the trace was interrupted; what was seen before stands")
            return seen
        return replace(seen, outcome=replace(seen.outcome, origin=traced.origin if traced else None))


@dataclass(frozen=True)
class _Again:
    """The second start of a command, and maybe a third."""

    command: Sequence[str]
    environ: Mapping[str, str]
    home: Path
    before: Outcome
    tell: Tell

    def trace(self, evidence: Evidence, capsule: Path) -> Traced | None:
        """Replay if there is a capsule, else or if that did not fail from the start. Tells what came of it."""
        event = first_try(evidence)
        if event is None:
            return None
        step, reason = int(event["step"]), no_replay(evidence)
        traced = None
        if reason is None:
            self.tell(f"nanbisect: tracing step {step}, replayed from its capsule ({_size(evidence)})")
            limits = {"NANBISECT_REPLAY": str(capsule), "NANBISECT_TRACE": "replay", "NANBISECT_STEPS": "1"}
            traced = self._start("replay", limits, REPLAY)
            self._told(traced)
            if traced.same_place:
                return traced
            reason = "the replay did not fail where the step had"
            if self.before.seconds > SOON:
                self.tell(f"nanbisect: the step itself is not traced: a run from the start takes {step} steps")
                return traced
        self.tell(f"nanbisect: tracing step {step}, from the start with the same seed ({reason})")
        traced = self._start("again", {"NANBISECT_TRACE": str(step), "NANBISECT_STEPS": str(step)}, FROM_START)
        self._told(traced)
        return traced

    def _told(self, traced: Traced) -> None:
        lines = [
            *(plain_lines(traced.origin, self.before) if traced.origin else ()),
            *([traced.note.text] if traced.note else ()),
        ]
        for place, line in enumerate(lines):
            self.tell(line if place else f"nanbisect: traced: {line}")

    def _start(self, name: str, limits: Mapping[str, str], way: str) -> Traced:
        folder = self.home / name
        folder.mkdir()
        env = {**self.environ, **NO_TRACKERS, **probe_environment(folder, self.environ), **limits}
        code = _run(self.command, {**env, "NANBISECT_STOP": "event"}, folder, most=2 * self.before.seconds + SOON)
        return origin_of(read_evidence(folder), watched(folder, code).outcome, self.before, way=way)


def no_replay(evidence: Evidence) -> str | None:
    """Why the step can't be replayed from capsules, or None. At step 1 the start itself is the replay."""
    event, told = first_try(evidence), evidence.events("capsule")
    if event is None or event["step"] == 1:
        return "it is the first"
    missed = next((line for line in told if not line["written"]), None)
    if missed is not None:
        return f"no capsule: {missed['reason']}"
    whole = {ranks.rank_of(line) for line in told if line["step"] == event["step"]}
    of = max(1, ranks.world(evidence.probe))
    if len(whole) < of:
        return "no capsule was written" if of == 1 else f"only {counted(len(whole), 'rank')} of {of} wrote a capsule"
    return None


def _size(evidence: Evidence) -> str:
    size = sum(line["bytes"] for line in evidence.events("capsule"))
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _run(command: Sequence[str], env: Mapping[str, str], folder: Path, *, most: float) -> int:
    """The exit code; its output goes to a log. What is left of it after so many seconds is ended."""
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        with passing_on(process):
            try:
                return process.wait(timeout=most)
            except subprocess.TimeoutExpired:
                return 1
            finally:
                _end(process, folder)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End it and what carries its folder, as after Ctrl-C: TERM, a moment, KILL."""
    deadline, kill = time.monotonic() + GRACE, False
    while (left := {*still_running(folder), *([process.pid] if process.poll() is None else [])}) and not (
        kill and time.monotonic() > deadline + GRACE
    ):
        kill = time.monotonic() > deadline
        for pid in left:
            with contextlib.suppress(psutil.Error):
                found = psutil.Process(pid)
                found.kill() if kill else found.terminate()
        time.sleep(0.1)
