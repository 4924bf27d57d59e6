"""`watch`: any command, unmodified; its output and its exit code are its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nanbisect.watch import diagnosis, watched
from tests import fakes
from tests.commands import nanbisect
from tests.test_ranks import bad, batch, came_to_rank_0, leave, step

pytestmark = pytest.mark.training
PYTHON = sys.executable
SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4), batch_size=2)
for step, batch in enumerate(data, start=1):
    hidden = model[1](model[0](batch))
    if step == 3 and "bad" in sys.argv:
        hidden = hidden * torch.where(hidden > 1e9, 1.0, (hidden * 0).sqrt())
    loss = model[2](hidden).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    first = next((n for n, p in model.named_parameters() if not p.grad.isfinite().all()), None)
    print("step", step, "first bad after clipping:", first, flush=True)
    optimizer.step()
    optimizer.zero_grad()
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A plain training loop that clips first and looks afterwards, and ends with a code of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_it_names_the_first_gradient_and_what_the_script_blamed(script: Path) -> None:
    """The script's own line names the first registered parameter; the NaN came into the middle one first."""
    done = nanbisect("watch", "--json", "seen.json", "--", PYTHON, "train.py", "bad", cwd=script)
    assert done.code == 7
    assert "step 3 first bad after clipping: 0.weight" in done.out
    assert "step 4" in done.out
    assert (
        "non-finite: NaN in backward of step 3, first in the gradient of 1.bias, while the loss is finite" in done.err
    )
    assert "would have blamed 0.weight" in done.err
    assert "records of that batch: row 4, row 5" in done.err
    assert "next: `nanbisect init command` writes a matrix" in done.err
    seen = json.loads((script / "seen.json").read_text())
    assert (seen["status"], seen["site"]["step"]) == ("nonfinite", 3)


def test_it_can_end_the_command_and_says_finite_so_far(script: Path) -> None:
    """After so many steps, and with --stop at the first event; a healthy script is called finite so far, no more."""
    done = nanbisect("watch", "--steps", "2", "--", PYTHON, "train.py", cwd=script)
    assert done.code == 0
    assert "step 2" in done.out
    assert "step 3" not in done.out
    assert "finite so far" in done.err
    stopped = nanbisect("watch", "--stop", "--", PYTHON, "train.py", "bad", cwd=script)
    assert "step 3" in stopped.out
    assert "step 4" not in stopped.out
    assert "non-finite" in stopped.err


def test_it_says_when_the_probe_saw_nothing(script: Path) -> None:
    """A wrapper that drops PYTHONPATH, a script without training, a command that is not there."""
    done = nanbisect("watch", "--", PYTHON, "-I", "train.py", "bad", cwd=script)
    assert done.code == 7
    assert "PYTHONPATH" in done.err
    assert "non-finite" not in done.err
    nothing = nanbisect("watch", "--", PYTHON, "-c", "import torch", cwd=script)
    assert nothing.code == 0
    assert "saw no backward" in nothing.err
    assert "did import torch and called no backward" in nothing.err
    failed = nanbisect("watch", "--", PYTHON, "-c", "import torch; exit(3)", cwd=script)
    assert "ended with code 3 before it trained" in failed.err
    assert "PYTHONPATH" not in failed.err
    nanbisect("watch", "--", "no-such-command", cwd=script).refused("no-such-command", "try:")


def test_a_json_that_cannot_be_written_is_said_before_the_command_runs(script: Path) -> None:
    """Not after days; and what fails at the end takes neither the diagnosis nor the exit code."""
    done = nanbisect("watch", "--json", "none/seen.json", "--", PYTHON, "-c", "print('ran')", cwd=script)
    done.refused("--json none/seen.json: there is no folder", "try:")
    assert "ran" not in done.out
    (script / "gone").mkdir()
    code = "import os, sys; os.rmdir('gone'); sys.exit(3)"
    done = nanbisect("watch", "--json", "gone/seen.json", "--", PYTHON, "-c", code, cwd=script)
    assert done.code == 3
    assert "gone/seen.json can't be written" in done.err


WAITING = """
import signal, sys, time
def told(number, _):
    print("told", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), told)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_signals_for_the_training_reach_it(tmp_path: Path) -> None:
    """A container or a scheduler tells its first process only: the training saves, ends, and is diagnosed."""
    (tmp_path / "train.py").write_text(WAITING)
    command = [PYTHON, "-m", "nanbisect", "watch", "--", PYTHON, "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(process.pid, number)
        time.sleep(0.3)
    out, err = process.communicate(timeout=30)
    assert (out.split(), process.returncode) == (["told", "SIGUSR1", "told", "SIGTERM"], 5)
    assert "nanbisect: the training exited with code 5; no Python process that has the probe imported torch" in err


# what is told ----------------------------------------------------------------------------------


def told(folder: Path, *ranks: list[Mapping[str, Any]], code: int = 0, command: str = "torchrun train.py") -> list[str]:
    """The diagnosis of what these ranks left."""
    leave(folder, *ranks)
    return list(diagnosis(watched(folder, code), command.split()))


def test_the_diagnosis_of_several_ranks(tmp_path: Path) -> None:
    """The rank, its records, what a check says, whether the weights are lost, what to do."""
    zero, one = came_to_rank_0()
    one.append(bad(1, "optimizer"))
    assert told(tmp_path, zero, one) == [
        "nanbisect: non-finite: NaN in backward of step 2, first in the gradient of b, on rank 1 of 2 (rank 0 got it "
        "by the reduction of gradients), while the loss is finite (4, the mean over ranks)",
        "records of that batch on rank 1: r5",
        "a check after clipping would have blamed a (9 of 9 elements); the first gradient to arrive non-finite was b",
        "after step 2 the weights or the optimizer's state are non-finite: go back to before it",
        "next: `nanbisect init command` writes a matrix (with `steps: 2`) to find the setting that brings it",
    ]


def test_the_diagnosis_of_an_optimizer_of_a_loss_and_of_a_late_event(tmp_path: Path) -> None:
    """Each says what was still finite; of a late one, how to come back to it soon."""
    lines = told(
        tmp_path / "a", [batch(1, "r0"), bad(0, "optimizer", at=1, micro_batch=7), step(1, 2.0)], command="x/trl sft"
    )
    assert lines[0] == (
        "nanbisect: non-finite: NaN in the optimizer of step 1, first in b, while the loss is finite (2)"
    )
    assert lines[1].startswith("no loss and no gradient had been non-finite before")
    assert lines[2:4] == ["records of that step: r0", lines[3]]
    assert "`nanbisect init trl` writes a matrix (with `steps: 1`)" in lines[-1]
    lines = told(tmp_path / "b", [bad(0, "loss", at=1, tensors=[]), step(1, "+inf")])
    assert lines[0] == "nanbisect: non-finite: NaN in the loss of step 1"
    assert lines[1] == "every gradient of that step was finite all the same"
    lines = told(tmp_path / "d", [bad(0, "loss", at=1, tensors=[], backward=False), step(1, 2.0)])
    assert "every gradient" not in " ".join(lines)  # those are of another batch
    lines = told(tmp_path / "c", [bad(0, "backward", at=900), step(900, 1.0, bad=fakes.nonfinite_event()["tensors"])])
    assert "Put the records of step 900 first in the data" in lines[-2]
    assert "steps:" not in lines[-1]


def test_the_weights_are_lost_from_the_first_step_that_was_taken(tmp_path: Path) -> None:
    """Also where it arose in the reduction, so that no rank calls its optimizer the place; not for a dropped step."""
    norm, weights = bad(0, "reduce", tensors=[]), bad(0, "reduce")
    lines = told(tmp_path / "taken", [norm, weights, step(2, 1.0), bad(0, "optimizer", at=3), step(3, 1.0)])
    assert "after step 2 the weights or the optimizer's state are non-finite: go back to before it" in lines
    lines = told(tmp_path / "dropped", [norm, step(2, 1.0, ended="dropped", taken=False)])
    assert not [line for line in lines if "go back" in line]


def test_the_diagnosis_of_state_that_was_looked_at_now_and_then(tmp_path: Path) -> None:
    """It may have arisen in any step since: all of them are named, and the first of them is the one to go back to."""
    batches = [batch(number, f"r{number}") for number in range(60, 81)]
    lines = told(tmp_path, [*batches, bad(0, "optimizer", at=80, since=70), step(80, 2.0)])
    assert lines[0].startswith("nanbisect: non-finite: NaN in the optimizer of one of steps 71 to 80, first in b")
    assert any(line.startswith("records of steps 71 to 80: r71, r72") for line in lines)
    assert "after step 71 the weights or the optimizer's state may be non-finite: go back to before it" in lines
    assert any("Put the records of steps 71 to 80 first in the data" in line for line in lines)


def test_the_diagnosis_of_a_finite_run(tmp_path: Path) -> None:
    """How much was looked at, and whose error it was that ended it."""
    assert told(tmp_path / "a", [step(1, 1.0)]) == ["nanbisect: finite so far, in 2 steps (2 backward passes)"]
    lines = told(tmp_path / "b", [step(1, 1.0)], code=1)
    assert lines == ["nanbisect: finite so far, in 2 steps (2 backward passes); then the training exited with code 1"]
    lines = told(tmp_path / "c", [step(1, 1.0), {"kind": "partial", "time": 12.0, "reason": "sharded"}], code=1)
    assert lines == ["nanbisect: the training exited with code 1"]  # what it did not see is not called finite
    lines = told(tmp_path / "d", [step(1, 1.0), {**fakes.EXIT, "unseen_since": 1}])
    assert lines == [
        "nanbisect: finite so far, in 2 steps (2 backward passes) (optimizer state up to step 1, when it was looked at "
        "last)"
    ]
