"""`rerun --with`: which changes a cell may have, for the built-in trainer and for commands."""

from __future__ import annotations

from nanbisect.app import with_changes
from nanbisect.matrix import Cell, Matrix, expand
from nanbisect.matrix_file import read_matrix
from nanbisect.trainers.registry import VOCABULARIES

SFT = """\
trainer: sft
recipe: causal-lm
steps: 1
factors: {batch_size: [1, 2], attention: [sdpa, eager]}
"""
COMMAND = """\
trainer: command
command: [python, train.py, --steps, "{steps}", --warmup, "{warmup}"]
steps: 1
settings: {lr: 1e-3, warmup: 0}
flags:
  batch_size: [--batch-size, "{value}"]
  lr: [--lr, "{value}"]
  checkpointing: {off: [], on: [--checkpointing]}
  kernel: {a: [--kernel, a], "*": [--other-kernel, "{value}"]}
factors: {batch_size: [1, 2], checkpointing: [off, on]}
"""


def read(text: str) -> Matrix:
    """A matrix, as a file `m.yaml` would be read."""
    return read_matrix(text, source="m.yaml", folder=".", vocabularies=VOCABULARIES)


def changed(text: str, *changes: str) -> tuple[Matrix, Cell]:
    """The matrix and cell of the first cell with these changes."""
    matrix = read(text)
    after, cell = with_changes(matrix, expand(matrix)[0], changes)
    assert cell is not None
    return after, cell


def test_a_batch_larger_than_any_of_the_matrix_gets_its_records() -> None:
    """The built-in trainer gives every cell the same number of records; a command's are its own affair."""
    assert changed(SFT, "batch_size=8")[0].steps == 4
    assert changed(SFT, "batch_size=2")[0].steps == 1
    assert changed(COMMAND, "batch_size=8")[0].steps == 1
