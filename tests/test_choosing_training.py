"""A search over hundreds of cells of real trainings, whose cause is arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import kills, tiny
from tests.commands import ROOT, nanbisect, result

pytestmark = pytest.mark.training


def test_a_pair_among_hundreds_of_cells_is_found_and_verified_across_a_kill(tmp_path: Path) -> None:
    """648 cells. 1e-8 is 0 in fp16, and AdamW divides 0 by 0 for a token that no record has: that pair, no other."""
    model = tiny.checkpoint(tmp_path / "model")
    data = tiny.write_lines(tmp_path / "data.jsonl", tiny.chats(8))
    out = tmp_path / "out"
    words = (
        *("run", str(ROOT / "matrices" / "many-settings.yaml"), "--model-path", str(model), "--train-jsonl", str(data)),
        *("--device", "cpu", "--out", str(out)),
    )
    with (tmp_path / "first.txt").open("w") as log:
        first = subprocess.Popen([sys.executable, "-m", "nanbisect", *words], cwd=tmp_path, stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    while len(before := kills.outcomes(out)) < 20 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.05)
    first.kill()
    first.wait()
    assert 20 <= len(before) < 40, (tmp_path / "first.txt").read_text()
    done = nanbisect(*words, "--resume", cwd=tmp_path)
    assert done.code == 1, done.err
    after = kills.outcomes(out)
    assert kills.changed(before, after) == []
    found = result(out)
    assert len(after) == len(found["cells"]) <= 80
    assert {cell["status"] for cell in found["cells"]} == {"finite", "nonfinite"}
    (cause,) = found["causes"]
    assert cause["levels"] == {"param_dtype": ["fp16"], "adam_eps": ["1e-8"]}
    assert (cause["standing"], cause["matching"], cause["checked"]) == ("supported", 72, 2)
    sites = {(c["site"]["phase"], c["site"]["kind"]) for c in found["cells"] if c["status"] == "nonfinite"}
    assert sites == {("optimizer", "nan")}
    known = found["completeness"]
    assert (known["complete"], known["up_to_factors"], known["strength"], known["pending"]) == (True, 3, [3, 2], 0)
    assert known["ended"] == "the search is complete at strength 3,2"
    assert json.loads((out / "search.json").read_text())["imported"] == []
    text = (out / "report.md").read_text()
    assert "Any further cause involves at least 4 factors." in text
    assert f"{cause['failed']} of 72 matching cells failed" in text
