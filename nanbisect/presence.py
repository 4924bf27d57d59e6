"""Whether the probe was there, and whether the training went as far as it was asked to. Pure.

Three things look alike from outside: PYTHONPATH never reached the training, no torch was imported, nothing
called backward. What each process leaves tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from nanbisect.outcome import Note, Status, number
from nanbisect.ranks import process_of

Line = Mapping[str, Any]
Refusal = tuple[Status, str]

ABSENT = (
    "the probe was not there: no Python process of the command read PYTHONPATH "
    "(dropped by a container, ssh, sudo, `env -u` or `python -I`?)"
)
NO_TORCH = (
    "no Python process that has the probe imported torch (does another Python train, without torch, or one that "
    "PYTHONPATH does not reach?)"
)
NO_BACKWARD = (
    "the probe saw no backward pass: no process that has it called backward (does one train that PYTHONPATH does not "
    "reach?)"
)
BACKGROUND = (
    "not judged: the command ended and left processes behind in the background, and what those train is not seen to "
    "its end; start the training in the foreground (no daemon, no `&`)"
)


class Seen(Protocol):
    """What is asked of an attempt's evidence."""

    @property
    def reached(self) -> bool:
        """Whether any Python process read our PYTHONPATH."""

    @property
    def armed(self) -> bool:
        """Whether any process imported torch under the probe."""

    @property
    def left(self) -> bool:
        """Whether processes were still there when the command had ended."""

    def events(self, kind: str) -> list[Line]:
        """The probe's events of one kind."""


def nothing_seen(seen: Seen) -> Refusal | None:
    """Why there is no training to judge."""
    for line in seen.events("probe_error"):
        if line["where"] == "install":
            return Status.FAILED, f"not judged: the probe could not be installed: {line['error']}"
    why = absent(seen) or (None if seen.events("step") else NO_BACKWARD)
    if why is None:
        return None
    return (Status.FAILED, BACKGROUND) if seen.left else (Status.NO_TRAINING, why)


def absent(seen: Seen) -> str | None:
    """Why no process had the probe."""
    if not (seen.reached or seen.armed):
        return ABSENT
    return None if seen.armed else NO_TORCH


def cut_short(seen: Seen) -> Refusal | None:
    """Why what was seen is not all that was trained."""
    died = seen.events("died")
    if died:
        return Status.FAILED, f"not judged: the thread that trained ended by an error: {died[0]['error']}"
    if seen.left and not told_to_the_end(seen):
        return Status.FAILED, BACKGROUND
    moved = [line for line in seen.events("step") if line["ended"] in ("step", "scaler_skip")]
    if moved and moved[-1]["ended"] == "scaler_skip":
        what = f"not judged: the GradScaler skipped the last step, at scale {number(moved[-1]['scale'] or 0.0):g}"
        return Status.FAILED, f"{what}: nothing shows that it would have settled"
    if (steps := _steps_of_short(seen)) and _unfinished(seen):
        what = "not judged: the command ended by itself after a forward that had no backward"
        return Status.FAILED, f"{what}, having taken {steps}: whether it saw a NaN there is not known"
    return None


def told_to_the_end(seen: Seen) -> bool:
    """Whether every training process told all it saw: a lost tail would hide what it held.

    One that was to stop after so many steps has judged the last of them by then; whether it leaves in good order or
    is ended by its launcher (when another rank aborts at its exit, as gloo's do now and then) is no matter.
    """
    stops = [line for line in seen.events("stopped") if line["forced"] or line["why"] == "steps"]
    told = {process_of(line) for line in (*seen.events("exit"), *stops)}
    return told >= {process_of(line) for line in seen.events("self_check")}


def doubts(seen: Seen) -> Iterator[Note]:
    """How far a training went that nobody stopped."""
    if steps := _steps_of_short(seen):
        yield Note("fewer_steps", f"the command ended by itself after {steps}")
    elif not seen.events("stopped") and _unfinished(seen):
        yield Note("unfinished", "the last forward had no backward, so whether its loss was a number is not known")


def _unfinished(seen: Seen) -> bool:
    return any(line.get("unfinished") for line in seen.events("exit"))


def _steps_of_short(seen: Seen) -> str:
    """`2 of 3 optimizer steps`, if every process that trained ended before the wanted number."""
    ends = [line for line in seen.events("exit") if line["backwards"]]
    if not ends or seen.events("stopped") or not all(line.get("short") for line in ends):
        return ""
    return f"{max(line['steps'] for line in ends)} of {ends[0]['short']} optimizer steps"
