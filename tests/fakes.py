"""Attempts that never start a process: what a training would have left, for the scripted executor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanbisect.evidence import Effect
from nanbisect.executors.base import Exit, Task
from nanbisect.executors.scripted import Clock, Scripted, ScriptedExecutor
from nanbisect.matrix import Cell, Factor, Matrix, Vocabulary
from nanbisect.run import Machine
from nanbisect.trainers.base import Launch


def lines(*entries: Mapping[str, Any]) -> str:
    """JSON lines, numbered as the probe's are."""
    return "".join(json.dumps({**entry, "n": number}) + "\n" for number, entry in enumerate(entries))


def step_event(step: int = 1, **changed: Any) -> dict[str, Any]:
    """The probe's account of a healthy step."""
    event = {
        "kind": "step", "time": 10.0 + step, "step": step, "taken": True, "ended": "step",
        "losses": [{"micro_batch": 0, "handed": 2.5, "unscaled": None}], "backwards": 1, "nested": 0, "recomputed": 0,
        "kernels": {}, "casts": 0, "gradients": 3, "bad": [], "norm": 1.25,
        "clip": {"call": "clip_grad_norm_", "max_norm": 1.0, "raised": False}, "after_clip": None,
        "gradient_norms": {"a": 1.0} if step == 1 else None, "scale": None, "memory": {"host": 1000, "device": None},
        "seconds": 0.5, "probe_seconds": 0.01,
    }  # fmt: skip
    return {**event, **changed}


def nonfinite_event(**changed: Any) -> dict[str, Any]:
    """The probe's first non-finite event: a NaN gradient at step 1."""
    tensor = {"name": "b", "value": "nan", "micro_batch": 0, "uses": [], "nan": 4, "posinf": 0, "neginf": 0, "numel": 4}
    event = {
        "kind": "nonfinite", "time": 10.5, "step": 1, "micro_batch": 0, "rank": 0, "phase": "backward", "value": "nan",
        "since": None, "backward": True,
        "tensors": [tensor], "bad": 1, "of": 3, "scale": None,
    }  # fmt: skip
    return {**event, **changed}


def batch_event(step: int, **changed: Any) -> dict[str, Any]:
    """The probe's account of a micro-batch's data."""
    event = {
        "kind": "batch", "time": 9.0 + step, "step": step, "micro_batch": 0, "rank": 0, "module": "Net",
        "matched": "content", "indices": None, "records": None, "contents": None, "shapes": {}, "backward": True,
        "padding": None, "valid_labels": None,
    }  # fmt: skip
    return {**event, **changed}


AWAKE = {"kind": "awake", "time": 1.0, "schema": 1, "rank": 0, "pid": 1, "argv": [], "torch": "2", "python": "3"}
CHECKED = {"kind": "self_check", "time": 2.0, "seen": True, "device": "cpu", "rank": 0, "world": 1}


def diary(*steps: Mapping[str, Any], how: str | None = "done", seed: int = 0, **end: Any) -> str:
    """The trainer's own lines, ending with `how` (None: it never said)."""
    resolved = {"precision": "fp32", "seed": seed}
    entries: list[Mapping[str, Any]] = [{"kind": "loaded", "at": 1.0, "resolved": resolved}]
    for number, step in enumerate(steps, start=1):
        entries.append({"kind": "micro_batch", "at": 1.5, "step": number, "window": number, "records": [f"r{number}"]})
        entries.append(
            {"kind": "step", "at": 1.0 + number, "step": number, "window": number, **{"taken": True, **step}}
        )
    if how is not None:
        entries.append({"kind": "end", "at": 9.0, "how": how, **end})
    return lines(*entries)


EXIT = {
    "kind": "exit", "time": 20.0, "steps": 2, "backwards": 2, "events": 0, "repairs": {}, "short": 0,
    "unfinished": False, "unseen_since": None, "seconds": 1.0, "probe_seconds": 0.03,
}  # fmt: skip
STEP = {"grad_norm": 1.25, "losses": [2.5], "channels": [{"text": [25.0, 10.0]}]}


def finite_files() -> dict[str, str]:
    """What a healthy attempt leaves."""
    return {
        "armed.jsonl": lines({"pid": 1, "argv": []}),
        "events.0.1.jsonl": lines(AWAKE, CHECKED, step_event(1), step_event(2), EXIT),
        "trainer.jsonl": diary(STEP, STEP),
    }


def nonfinite_files() -> dict[str, str]:
    """What an attempt with a NaN gradient leaves."""
    bad = nonfinite_event()["tensors"]
    census = {"first": "a", "bad": 9, "numel": 9, "parameters_bad": 3, "parameters": 3}
    step = step_event(1, bad=bad, norm="nan", after_clip=census)
    return {
        "armed.jsonl": lines({"pid": 1, "argv": []}),
        "events.0.1.jsonl": lines(AWAKE, CHECKED, nonfinite_event(), step),
        "trainer.jsonl": diary({**STEP, "grad_norm": "nan"}, how="stopped"),
    }


class FakeTrainer:
    """Writes the cell beside the attempt, so that the script can read it; checks nothing."""

    vocabulary = Vocabulary(settings={})

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """A command that nobody runs."""
        (folder / "cell.json").write_text(json.dumps({"levels": dict(cell.levels), "seed": seed}))
        return Launch(("train", cell.id), str(folder), {"SEED": str(seed)})

    def check(self, matrix: Matrix, *, folder: Path) -> Launch:
        """A command that nobody runs."""
        return Launch(("check",), str(folder))

    def levels(self, matrix: Matrix, *, folder: Path, python: str | None = None) -> Launch | None:
        """A command that nobody runs."""
        return Launch(("levels",), str(folder))

    def effect(self, matrix: Matrix, cell: Cell, resolved: Mapping[str, Any]) -> Effect:
        """Everything took effect."""
        return Effect()

    def keep(self, matrix: Matrix, cell: Cell) -> str:
        """Any cells may share a process."""
        return "any"

    def inputs(self, matrix: Matrix) -> Mapping[str, Path]:
        """Nothing."""
        return {}

    def steps_for(self, matrix: Matrix, levels: Mapping[str, str]) -> int:
        """The matrix's own."""
        return matrix.steps

    def work(self, matrix: Matrix, cells: Sequence[Cell]) -> Mapping[str, float]:
        """Two micro-batches, as many as the files have."""
        return {cell.id: 2.0 for cell in cells}


Levels = Mapping[str, str]


def executor_for(
    fails: Callable[[Levels], bool], *, seconds: float = 1.0, ends: Mapping[str, Exit] | None = None
) -> ScriptedExecutor:
    """An executor whose cells fail as `fails` says; `ends` maps a level to how its cells end instead."""

    def script(task: Task) -> Scripted:
        levels = json.loads((task.folder / "cell.json").read_text())["levels"]
        for level, end in (ends or {}).items():
            if level in levels.values():
                return Scripted(exit=end, seconds=seconds)
        files = nonfinite_files() if fails(levels) else finite_files()
        return Scripted(exit=Exit("exited", code=0, seconds=seconds), seconds=seconds, files=files)

    return ScriptedExecutor(script, clock=Clock())


def matrix_of(**factors: tuple[str, ...]) -> Matrix:
    """A matrix with these factors."""
    return Matrix(name="fake", trainer="fake", factors=tuple(Factor(name, levels) for name, levels in factors.items()))


MACHINE = Machine({"device": "cpu"}, (), ("cpu0",))
