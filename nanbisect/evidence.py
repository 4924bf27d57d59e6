"""What an attempt left behind: lines of the probe and of the trainer, and how the process ended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanbisect.outcome import Note

Line = Mapping[str, Any]
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use|port.{0,80}another process is utilizing it", re.I)
PORT_TAKEN = "port_taken"  # the doubt about an attempt that found its port in use


@dataclass(frozen=True)
class Effect:
    """What the settings became. `failed`: one is not what was asked for, so the cell is not what it claims to be.

    `doubts`: what looks otherwise than its level's name says, but is the recipe's own affair.
    """

    failed: str | None = None
    doubts: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Ending:
    """How the process ended, in the executor's words: `why` is exited unless somebody ended it.

    `stragglers`: processes of its own that were still there; `started`: cold, warm or kept.
    """

    why: str
    code: int | None
    signal: int | None
    seconds: float
    oom_kill: bool
    stragglers: int = 0
    started: str = ""


@dataclass(frozen=True)
class Evidence:
    """All lines of an attempt. `probe` holds the events of all ranks by time, each with its `rank`, `diary` the
    trainer's own lines.

    `reached`: a Python process read our PYTHONPATH; `armed`: one imported torch, too. `lost`: lines of the probe are
    missing or not of the form that its schema gives. `port_taken`: the log says that a port was in use.
    """

    ending: Ending
    probe: tuple[Line, ...]
    diary: tuple[Line, ...]
    armed: bool
    lost: bool = False
    log_tail: tuple[str, ...] = ()
    port_taken: bool = False
    reached: bool = False

    @property
    def left(self) -> bool:
        """Whether processes were still there when the main one had ended."""
        return self.ending.stragglers > 0

    def events(self, kind: str) -> list[Line]:
        """The probe's events of one kind."""
        return [line for line in self.probe if line.get("kind") == kind]

    def lines(self, kind: str) -> list[Line]:
        """The trainer's lines of one kind."""
        return [line for line in self.diary if line.get("kind") == kind]

    @property
    def end(self) -> Line:
        """The trainer's last word, or an empty mapping."""
        ends = self.lines("end")
        return ends[-1] if ends else {}


def says_port_taken(text: str) -> bool:
    """Whether a launcher or a library says in a log that it can't listen on its port."""
    return PORT_IN_USE.search(text) is not None


def log_tail(text: str, lines: int = 20) -> tuple[str, ...]:
    """The last lines of a log that say something."""
    kept: Sequence[str] = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(line[:400] for line in kept[-lines:])
