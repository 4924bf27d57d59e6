"""A driver over trainings that take a fraction of a second and need no torch.

python -m tests.quick_driver OUT [--resume]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nanbisect.executors.local import LocalExecutor
from nanbisect.matrix import Cell, Matrix
from nanbisect.run import Driver, Machine, Occasion, execute
from nanbisect.store import Store
from nanbisect.trainers.base import Launch
from tests import fakes

MATRIX = fakes.matrix_of(a=("0", "1"), b=("0", "1", "2"), c=("0", "1"))
TRAINING = """
import json, pathlib, sys, time
for name, text in json.loads(sys.argv[1]).items():
    time.sleep(0.08)
    pathlib.Path(name).write_text(text)
"""


class QuickTrainer(fakes.FakeTrainer):
    """Writes a finished attempt's files, one after another."""

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """A real process."""
        bad = cell.levels["a"] == "1" and cell.levels["b"] == "2"
        files = fakes.nonfinite_files() if bad else fakes.finite_files()
        return Launch((sys.executable, "-S", "-c", TRAINING, json.dumps(files)), str(folder))


def main(out: Path) -> None:
    """Begin, or go on."""
    store = Store(out) if (out / "run.json").exists() else Store.create(out, {})
    machine = Machine({"device": "cpu"}, (), ("cpu0", "cpu1"))
    executor = LocalExecutor()
    try:
        execute(
            Driver(MATRIX, QuickTrainer(), executor, store=store, machine=machine, occasion=Occasion()),
            lambda event: None,
        )
    finally:
        executor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
