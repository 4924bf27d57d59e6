"""Warm and cold give the same numbers: the built-in trainer with its model held, and a user's command."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanbisect.executors.base import Task, child_environment
from nanbisect.executors.local import LocalExecutor
from nanbisect.judging import judge
from nanbisect.matrix import Factor, Matrix, expand
from nanbisect.outcome import Outcome
from nanbisect.store import read_evidence
from nanbisect.trainers.registry import TRAINERS
from tests import tiny
from tests.test_executors import until

pytestmark = [
    pytest.mark.training,
    pytest.mark.skipif(sys.platform != "linux", reason="attempts start warm on Linux only"),
]
TIMES = ("seconds", "load_seconds", "train_seconds", "memory_bytes", "log_tail", "started")


def outcomes(
    matrix: Matrix, folder: Path, *, warm: bool, keep: bool = False, after_first: Any = None
) -> list[dict[str, Any]]:
    """What every cell ended with, in order, less times; `after_first()` is called when the first has ended.

    `keep`: cells share a process that keeps its model.
    """
    trainer, found = TRAINERS[matrix.trainer], list[Outcome]()
    executor = LocalExecutor(warm=warm)
    try:
        for cell in expand(matrix):
            attempt = folder / cell.slug
            attempt.mkdir(parents=True)
            launch = trainer.launch(matrix, cell, seed=0, folder=attempt)
            env = child_environment(os.environ, set=launch.env)
            start = replace(launch.warm, keep=trainer.keep(matrix, cell)) if keep and launch.warm else launch.warm
            task = Task(launch.argv, env, Path(launch.workdir), attempt, 120, ("cpu0",), start)
            handle = executor.start(task)
            ended = until(lambda handle=handle: executor.poll(handle), 120)  # type: ignore[misc]
            evidence = read_evidence(attempt, ended)
            found.append(judge(evidence, attempt=1, seed=0, effect_of=partial(trainer.effect, matrix, cell)))
            assert found[-1].started == ("kept" if keep else "warm" if warm else "cold")
            if after_first is not None and len(found) == 1:
                after_first()
        assert not executor.remarks()
        assert warm == bool(executor._servers.servers)
    finally:
        executor.close()
    return [{name: value for name, value in one.to_json().items() if name not in TIMES} for one in found]


def test_a_held_model_gives_the_same_numbers_and_is_read_once(tmp_path: Path) -> None:
    """Dropout, tied weights, attention set afterwards; and after the first cell nobody reads the file."""
    model = tiny.checkpoint(tmp_path / "model", "gpt2")
    data = tiny.write_lines(tmp_path / "data.jsonl", tiny.chats(8))
    matrix = Matrix(
        name="held",
        trainer="sft",
        recipe="causal-lm",
        model=str(model),
        data=str(data),
        steps=2,
        device="cpu",
        folder=str(tmp_path),
        factors=(Factor("attention", ("sdpa", "eager")), Factor("gradient_checkpointing", ("off", "on"))),
    )
    cold = outcomes(matrix, tmp_path / "cold", warm=False)
    (weights,) = model.glob("*.safetensors")
    content = weights.read_bytes()
    warm = outcomes(matrix, tmp_path / "warm", warm=True, after_first=weights.unlink)
    assert all(one["status"] == "finite" and len(one["loss"]) == 2 for one in cold)
    assert warm == cold
    weights.write_bytes(content)
    kept = outcomes(matrix, tmp_path / "kept", warm=True, keep=True, after_first=weights.unlink)
    assert kept == cold
    assert len(pids(tmp_path / "kept")) == 1


def pids(folder: Path) -> set[int]:
    """The processes that trained."""
    return {json.loads(path.read_text())["main"]["pid"] for path in folder.rglob("pids.json")}


SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
batch, bad = int(sys.argv[1]), sys.argv[2] == "on"
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(torch.randn(16, 4), batch_size=batch, num_workers=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    loss = model(rows).square().mean()
    if bad and batch > 2:
        loss = loss * float("nan")
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("words", "batches"),
    [
        (("train.py",), ("2", "4")),
        (("-m", "train"), ("4",)),
        (("-m", "accelerate.commands.launch", "--cpu", "train.py"), ("4",)),
    ],
)
def test_a_command_gives_the_same_numbers(tmp_path: Path, words: tuple[str, ...], batches: tuple[str, ...]) -> None:
    """The same losses, norms, batches, sites and notes, also with a data-loader worker."""
    (tmp_path / "train.py").write_text(SCRIPT)
    matrix = Matrix(
        name="command",
        trainer="command",
        command=(sys.executable, *words, "{batch_size}", "{extra}"),
        steps=2,
        device="cpu",
        folder=str(tmp_path),
        factors=(Factor("batch_size", batches), Factor("extra", ("off", "on"))),
    )
    cold = outcomes(matrix, tmp_path / "cold", warm=False)
    warm = outcomes(matrix, tmp_path / "warm", warm=True)
    assert [one["status"] for one in cold] == [*["finite"] * (2 * len(batches) - 1), "nonfinite"]
    assert warm == cold
