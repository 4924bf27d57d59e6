"""`rerun --with`: which changes a cell may have, for the built-in trainer and for commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nanbisect import app as application
from nanbisect.changes import with_changes
from nanbisect.errors import UsageError
from nanbisect.matrix import Cell, Matrix, expand
from nanbisect.matrix_file import read_matrix
from nanbisect.run import Machine, Occasion, run_json
from nanbisect.store import Store
from nanbisect.trainers.registry import TRAINERS, VOCABULARIES

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


def read(text: str, folder: Path | str = ".") -> Matrix:
    """A matrix, as a file `m.yaml` would be read."""
    return read_matrix(text, source="m.yaml", folder=str(folder), vocabularies=VOCABULARIES)


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


@pytest.mark.parametrize(
    ("text", "change", "level"),
    [
        (SFT, "attention=flash", "flash"),
        (SFT, "param_dtype=fp16", "fp16"),
        (SFT, "gradient_checkpointing=true", "on"),
        (COMMAND, "batch_size=8", "8"),
        (COMMAND, "lr=5e-4", "5e-4"),
        (COMMAND, "checkpointing=on", "on"),
        (COMMAND, "checkpointing=True", "on"),
        (COMMAND, "kernel=b", "b"),
        (COMMAND, "warmup=7", "7"),
        (COMMAND, "seed=3", "3"),
    ],
)
def test_any_setting_can_be_changed(text: str, change: str, level: str) -> None:
    """Varied, fixed or neither: one of the trainer's, one that flags map, one that the command uses by name."""
    assert changed(text, change)[1].levels[change.partition("=")[0]] == level


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        (COMMAND, ["attention=eager"], ("no setting attention", "a line under flags")),
        (SFT, ["atention=eager"], ("no setting atention", "did you mean attention?")),
        (COMMAND, ["steps=9"], ("steps is a key of the matrix", "--steps")),
        (COMMAND, ["env=x"], ("env is a key of the matrix", "a new run")),
        (COMMAND, ["checkpointing=maybe"], ("'maybe' is not a level of checkpointing", "one of off, on")),
        (COMMAND, ["lr="], ("no level", "--with lr=LEVEL")),
        (COMMAND, ["lr"], ("no level", "--with lr=LEVEL")),
        (COMMAND, ["lr=1", "lr=2"], ("lr is given twice",)),
        (SFT, ["channel_weights=1,8"], ("one channel, text",)),
    ],
)
def test_what_cannot_be_changed_is_refused(text: str, changes: list[str], words: tuple[str, ...]) -> None:
    """With the reason and something to try."""
    with pytest.raises(UsageError) as caught:
        changed(text, *changes)
    for word in (*words, "try:"):
        assert word in str(caught.value)


# in a run folder -------------------------------------------------------------------------------


def run_of(text: str, folder: Path, blocked: tuple[tuple[dict[str, str], str], ...] = ()) -> Store:
    """The folder of a run whose cells nobody has run."""
    matrix = read(text, folder)
    machine = Machine({"device": "cpu"}, blocked, ("cpu0",))
    return Store.create(folder / "run", run_json(matrix, TRAINERS[matrix.trainer], machine, Occasion()))


def rerun(store: Store, cell: str, *changes: str) -> int:
    """`nanbisect rerun STORE CELL --with ...`."""
    return application.rerun(str(store.folder), cell, repeat=1, changes=changes, reports=store.folder)


def test_changed_settings_reach_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of them at once, each through its own template."""
    (tmp_path / "train.py").write_text("import sys\nprint('WORDS', sys.argv[1:])\n")
    store = run_of(COMMAND.replace("python,", f"{sys.executable},") + "device: cpu\n", tmp_path)
    code = rerun(store, "1", "batch_size=8", "lr=5e-4", "checkpointing=true", "kernel=b", "warmup=7")
    words = ["--steps", "1", "--warmup", "7", "--batch-size", "8", "--lr", "5e-4", "--checkpointing"]
    out = capfd.readouterr().out
    assert f"WORDS {[*words, '--other-kernel', 'b']}" in out
    assert code == 3
    assert "it had not been run before" in out


PRESET = """\
trainer: transformers
command: [PYTHON, train.py]
device: cpu
factors: {batch_size: [1, 2], liger: [off, on]}
"""


def test_a_level_that_this_machine_lacks_is_said_before_the_command_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `run` does, for a changed setting and for a cell that could not be run before."""
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    text = PRESET.replace("PYTHON", sys.executable)
    store = run_of(text, tmp_path, (({"liger": "on"}, "liger=on needs the package liger_kernel"),))
    for cell, changes, said in (("1", ["liger=on"], "cell 1 with liger=on"), ("2", [], "cell 2")):
        assert rerun(store, cell, *changes) == 3
        out = capfd.readouterr().out
        assert f"{said}: not on this machine: liger=on needs" in out
        assert "started" not in out
    assert not list(store.folder.glob("*/*/attempt-1"))


RECIPE = """\
def model(settings):
    import torch
    return torch.nn.Linear(2, 1)
def records(settings):
    yield {"id": 1}
def collate(records, settings):
    return {}
def losses(model, batch):
    return {}
"""


@pytest.mark.training
def test_the_built_in_trainer_looks_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A kernel that torch has on no CPU."""
    (tmp_path / "mine.py").write_text(RECIPE)
    store = run_of(SFT.replace("causal-lm", "mine.py") + "device: cpu\n", tmp_path)
    assert rerun(store, "1", "attention=sdpa:efficient") == 3
    assert "cell 1 with attention=sdpa:efficient: not on this machine: " in capfd.readouterr().out
    assert not list(store.folder.glob("*/*/attempt-1"))
