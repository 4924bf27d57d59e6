"""`watch`: any command, unmodified; its output and its exit code are its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.commands import nanbisect

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
    nanbisect("watch", "--", "no-such-command", cwd=script).refused("no-such-command", "try:")
