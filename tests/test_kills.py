"""kill -9 of the driver, the shim or the training, and resuming: on real processes, small ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nanbisect.matrix import expand
from nanbisect.outcome import Status
from nanbisect.store import Store
from tests import kills, quick_driver


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_lose_nothing_and_leave_nothing(tmp_path: Path, seed: int) -> None:
    """Whoever dies, whenever: the same final result."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "tests.quick_driver", str(out)]
    assert kills.trial(command, out, count=6, seed=seed, longest=1.6) == []
    store = Store(out)
    statuses = {
        cell.number: [o.status for o in store.outcomes(cell) if o.judged] for cell in expand(quick_driver.MATRIX)
    }
    bad = {number for number, found in statuses.items() if found == [Status.NONFINITE]}
    assert bad == {11, 12}
    assert all(len(found) == 1 for found in statuses.values())
