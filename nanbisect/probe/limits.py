"""What the driver wants of this process, read from the environment once, when the probe is installed."""

from __future__ import annotations

from typing import Mapping, NamedTuple


class Limits(NamedTuple):
    """`at_event`: stop at the first non-finite event. `steps`, `backwards`: stop after so many (0: never).

    `every_line`: the run has an end that the driver knows, so every step is written. Otherwise (a command
    that may run for days) files are kept small. `trace`: the step to trace (0: none). `capsule`: the folder to write
    one into, `replay`: the one to play back; empty where that is not wanted. `deterministic`: kernels, or
    kernels+fill (fresh memory filled with NaN).
    """

    at_event: bool = False
    steps: int = 0
    backwards: int = 0
    every_line: bool = True
    trace: int = 0
    capsule: str = ""
    replay: str = ""
    deterministic: str = ""


def limits(environment: Mapping[str, str]) -> Limits:
    """Read NANBISECT_STOP and its like. The built-in trainer sets no stop: it stops by itself. The traced step of a
    replay is its first."""
    steps, backwards = (_number(environment.get(name, "")) for name in ("NANBISECT_STEPS", "NANBISECT_BACKWARDS"))
    stop, trace = environment.get("NANBISECT_STOP"), environment.get("NANBISECT_TRACE", "")
    traced = 1 if trace == "replay" else _number(trace)
    texts = (environment.get("NANBISECT_" + name, "") for name in ("CAPSULE", "REPLAY", "DETERMINISTIC"))
    return Limits(stop == "event", steps, backwards, stop is None or bool(steps or backwards), traced, *texts)


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0
