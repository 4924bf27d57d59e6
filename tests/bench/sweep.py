"""What a sweep costs beyond its training: `python -m tests.bench.sweep [--quick] [--rounds N]`.

The judgeable cells of the demo, the same trainings in several ways, one after the other on one slot:
(a) one Python process that imports once and trains them back to back, (a') the same with a bare fork a
cell, (b) `nanbisect run`, (c) `nanbisect run --cold`, (d) a loop of `accelerate launch`. None traces.
Losses must be the same bits in all.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from nanbisect.matrix import Cell, Matrix, expand
from nanbisect.matrix_file import read_matrix
from nanbisect.trainers.base import probe_environment
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "matrices" / "demo.yaml"
QUICK = {"gradient_checkpointing": "off", "batch_size": "8"}
Losses = dict[str, list[str]]


@dataclass(frozen=True)
class Way:
    """One way to run the sweep: `seconds` of wall time, and every cell's losses as they were written."""

    name: str
    seconds: float
    losses: Losses


def demo(*, quick: bool) -> tuple[Matrix, list[Cell]]:
    """The demo's matrix and its 24 cells that a CPU can run, or four of them."""
    matrix = read_matrix(DEMO.read_text(), source=str(DEMO), folder=str(DEMO.parent), vocabularies=VOCABULARIES)
    cells = [cell for cell in expand(matrix) if cell.levels["attention"] != "flash"]
    return matrix, [cell for cell in cells if cell.levels.items() >= QUICK.items()] if quick else cells


def jobs(matrix: Matrix, cells: Sequence[Cell], folder: Path) -> dict[str, Path]:
    """Folder of every cell with the job that its training process reads."""
    found = {}
    for cell in cells:
        found[cell.id] = folder / cell.slug
        found[cell.id].mkdir(parents=True)
        TRAINERS["sft"].launch(matrix, cell, seed=0, folder=found[cell.id])
    return found


def losses_in(folder: Path) -> list[str]:
    """Losses of an attempt, as text: the bits, not a rounded value."""
    lines = [json.loads(line) for line in (folder / "trainer.jsonl").read_text().splitlines()]
    return [json.dumps(line["losses"]) for line in lines if line["kind"] == "step"]


# the ways --------------------------------------------------------------------------------------

BACK_TO_BACK = """
import json, os, sys
from accelerate.state import AcceleratorState
from nanbisect.trainers.sft.__main__ import main
probe = sys.modules["_nanbisect_probe"]
for folder in json.loads(sys.argv[1]):
    os.environ["NANBISECT_PROBE"] = folder
    probe._observer.forked()
    probe.moved(folder)
    AcceleratorState._reset_state(True)
    main([folder + "/job.json"])
"""


BARE_FORKS = """
import gc, json, os, sys
import torch._dynamo
import nanbisect.trainers.sft.loop
from nanbisect.trainers.sft.__main__ import KERNELS, leave, main
gc.collect()
gc.freeze()
for folder in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        os.environ.update(KERNELS, NANBISECT_PROBE=folder)
        sys.modules["_nanbisect_probe"].moved(folder)
        leave(main([folder + "/job.json"]))
    os.waitpid(pid, 0)
"""


def one_python(code: str) -> Callable[[Matrix, Sequence[Cell], Path], Losses]:
    """(a), and its like with a process of its own for every cell: what isolation costs at the least."""

    def run(matrix: Matrix, cells: Sequence[Cell], folder: Path) -> Losses:
        made = jobs(matrix, cells, folder)
        env = {**os.environ, "PYTHONHASHSEED": "0", **probe_environment(folder, os.environ)}
        _quietly([sys.executable, "-c", code, json.dumps([str(path) for path in made.values()])], env)
        return {name: losses_in(path) for name, path in made.items()}

    return run


def ours(*options: str) -> Callable[[Matrix, Sequence[Cell], Path], Losses]:
    """(b) and (c)"""

    def run(matrix: Matrix, cells: Sequence[Cell], folder: Path) -> Losses:
        chosen: list[str] = []
        for factor in matrix.factors:
            levels = dict.fromkeys(cell.levels[factor.name] for cell in cells)
            chosen += ["--factor" if len(levels) > 1 else "--set", f"{factor.name}={'|'.join(levels)}"]
        argv = [sys.executable, "-m", "nanbisect", "run", str(DEMO), *chosen, "--out", str(folder / "run"), *options]
        _quietly(argv, dict(os.environ), codes=(0, 1))
        made = [Cell(0, cell["levels"]) for cell in json.loads((folder / "run" / "result.json").read_text())["cells"]]
        slugs = {cell.id: next(one.slug for one in made if one.levels.items() <= cell.levels.items()) for cell in cells}
        return {name: losses_in(folder / "run" / "cells" / slug / "attempt-1") for name, slug in slugs.items()}

    return run


def launched(matrix: Matrix, cells: Sequence[Cell], folder: Path) -> Losses:
    """(d)"""
    made = jobs(matrix, cells, folder)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    for path in made.values():
        env = {**os.environ, "PYTHONHASHSEED": "0", **probe_environment(path, os.environ)}
        _quietly([*launch, "-m", "nanbisect.trainers.sft", str(path / "job.json")], env)
    return {name: losses_in(path) for name, path in made.items()}


WAYS = {
    "(a) one process, back to back": one_python(BACK_TO_BACK),
    "(a') one process, a bare fork a cell": one_python(BARE_FORKS),
    "(b) `nanbisect run`": ours("--no-trace"),
    "(c) `nanbisect run --cold`": ours("--no-trace", "--cold"),
    "(d) a loop of `accelerate launch`": launched,
}


def _quietly(argv: Sequence[str], env: dict[str, str], codes: Sequence[int] = (0,)) -> None:
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise SystemExit(f"{argv[:4]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def measure(*, quick: bool, rounds: int = 1) -> list[Way]:
    """All ways in turn, so often, and the median of each; with bytecode there, as pip leaves it.

    Exits when their losses differ.
    """
    compileall.compile_dir(str(ROOT / "nanbisect"), quiet=1)
    matrix, chosen = demo(quick=quick)
    found: dict[str, list[Way]] = {name: [] for name in WAYS}
    for name, way in list(WAYS.items()) * rounds:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            losses = way(matrix, chosen, Path(folder))
            found[name].append(Way(name, time.monotonic() - began, losses))
        first = next(iter(found.values()))[0]
        if losses != first.losses:
            raise SystemExit(f"{name} gave other losses than {first.name}")
    return [replace(ways[0], seconds=median(way.seconds for way in ways)) for ways in found.values()]


def table(ways: Sequence[Way], training: float) -> str:
    """Markdown. `training`: seconds that (a) spent in training itself."""
    count = len(ways[0].losses)
    rows = ["| way | wall | relative to (a) | a cell, beyond its training |", "| --- | ---: | ---: | ---: |"]
    for way in ways:
        beyond = (way.seconds - training) / count
        rows.append(f"| {way.name} | {way.seconds:.0f} s | {way.seconds / ways[0].seconds:.2f} | {beyond:.2f} s |")
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four of the demo's 24 judgeable cells")
    parser.add_argument("--rounds", type=int, default=1, help="so often, in turn; the median counts")
    given = parser.parse_args()
    ways = measure(quick=given.quick, rounds=given.rounds)
    imports = time_of_imports()
    sys.stdout.write(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; ")
    sys.stdout.write(f"{len(ways[0].losses)} cells, rounds: {given.rounds}, the same losses in all; ")
    sys.stdout.write(f"imports alone take {imports:.1f} s\n\n")
    sys.stdout.write(table(ways, ways[0].seconds - imports) + "\n")


def time_of_imports() -> float:
    """Seconds that (a) needs before its first cell, the best of three."""
    code = "import nanbisect.trainers.sft.loop"
    times = []
    for _ in range(3):
        began = time.monotonic()
        _quietly([sys.executable, "-c", code], dict(os.environ))
        times.append(time.monotonic() - began)
    return min(times)


if __name__ == "__main__":
    main()
