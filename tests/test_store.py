"""The run folder: whole or absent, never torn; and clear words when the disk says no."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from nanbisect.errors import StoreError
from nanbisect.matrix import Cell
from nanbisect.outcome import Outcome, Status
from nanbisect.store import Store, atomic_write, explained, find_run, probe_events, read_evidence, read_lines, whole
from tests import fakes

CELL = Cell(1, {"attention": "eager", "batch_size": "8"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new run folder."""
    return Store.create(tmp_path / "run", {"matrix": {"name": "x"}})


def test_a_new_run_has_its_own_gitignore_and_reads_back(store: Store) -> None:
    """Logs of a run are not committed by accident."""
    assert (store.folder / ".gitignore").read_text() == "*\n"
    assert Store.open(store.folder).run()["matrix"] == {"name": "x"}


def test_attempts_are_numbered_and_outcomes_read_back(store: Store) -> None:
    """Attempt 10 comes after attempt 9."""
    for number in range(1, 12):
        taken, folder = store.new_attempt(CELL)
        assert taken == number
        store.write_outcome(folder, Outcome(Status.FINITE, "fine", attempt=number))
    assert [outcome.attempt for outcome in store.outcomes(CELL)] == list(range(1, 12))


def test_a_torn_outcome_counts_as_missing(store: Store) -> None:
    """It is judged again from the events."""
    _, folder = store.new_attempt(CELL)
    (folder / "outcome.json").write_text('{"schema": 1, "status": "fin')
    assert store.outcomes(CELL) == ()
    (folder / "outcome.json").write_text('{"schema": 99, "status": "finite"}')
    assert store.outcome(folder) is None


def test_torn_event_lines_are_left_out(tmp_path: Path) -> None:
    """A process that dies in the middle of a line leaves the lines before it."""
    path = tmp_path / "events.0.1.jsonl"
    path.write_bytes(b'{"kind": "awake"}\n{"kind": "step", "st')
    assert [line["kind"] for line in read_lines(path)] == ["awake"]
    assert read_lines(tmp_path / "absent") == []
    assert read_evidence(tmp_path).ending.why == "lost"


def test_lost_event_lines_are_noticed(tmp_path: Path) -> None:
    """A line that the disk had no room for, or of another version of the probe: nothing is whole then."""
    lines = [{**json.loads(text)} for text in fakes.finite_files()["events.0.1.jsonl"].splitlines()]
    assert whole(lines)
    assert whole(lines[:-1])  # a process that was killed
    assert not whole([*lines[:1], *lines[2:]])
    assert not whole([{**lines[0], "colour": "red"}, *lines[1:]])
    assert not whole([{**lines[0], "kind": "unheard of"}, *lines[1:]])
    assert set(probe_events()) >= {"awake", "nonfinite", "step"}


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    """With what is wrong and what to try."""
    with pytest.raises(StoreError, match="is not a run folder"):
        Store.open(tmp_path)
    (tmp_path / "run.json").write_text("{torn")
    with pytest.raises(StoreError, match="can't be read"):
        Store.open(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 99}')
    with pytest.raises(StoreError, match="another version"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match="not empty"):
        Store.create(tmp_path, {})


def test_runs_are_found_by_path_by_name_and_as_the_latest(tmp_path: Path) -> None:
    """`latest` is the one written last."""
    with pytest.raises(StoreError, match="no run below"):
        find_run("latest", tmp_path)
    for age, name in ((200, "a"), (100, "b")):
        Store.create(tmp_path / name, {})
        now = (tmp_path / name / "run.json").stat().st_mtime - age
        os.utime(tmp_path / name / "run.json", (now, now))
    assert find_run("latest", tmp_path).name == "b"
    assert find_run("a", tmp_path).name == "a"
    assert find_run(str(tmp_path / "a"), Path("elsewhere")).name == "a"
    with pytest.raises(StoreError, match="there is no run 'c'"):
        find_run("c", tmp_path)


def test_one_driver_a_run(store: Store) -> None:
    """A second one is told, and the lock goes with the first."""
    with store.lock(), pytest.raises(StoreError, match="another nanbisect is at work"), store.lock():
        pass
    with store.lock():
        pass


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle of a write: nothing half-written."""
    path = tmp_path / "result.json"
    atomic_write(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="disk is full"), explained(path):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EACCES, "no permission"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "quota"),
    ],
)
def test_errors_of_the_file_system_say_what_to_try(code: int, words: str, tmp_path: Path) -> None:
    """No traceback, and a mend."""
    with pytest.raises(StoreError, match=words) as caught, explained(tmp_path):
        raise OSError(code, os.strerror(code))
    assert "try:" in str(caught.value)


def test_results_are_strict_json(store: Store) -> None:
    """NaN has a name, not a literal."""
    store.write_report(markdown="# x", csv="a\n", result={"loss": [float("nan"), float("-inf")]})
    assert json.loads((store.folder / "result.json").read_text()) == {"loss": ["nan", "-inf"]}
