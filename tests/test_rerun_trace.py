"""Traces: of a cell (`rerun --trace`, and in `run`), and of a watched command, by real trainings."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanbisect import app as application
from nanbisect import tracing
from nanbisect.events import Event, TraceEnded, TraceStarted
from nanbisect.evidence import Ending, Evidence
from nanbisect.executors.base import Exit, Handle, Task
from nanbisect.executors.local import LocalExecutor
from nanbisect.executors.scripted import Clock, Scripted, ScriptedExecutor
from nanbisect.matrix_file import NO_OVERRIDES
from nanbisect.origins import NEITHER, UNSTABLE, UNWRITTEN, comes_and_goes, memory_words, origin_of
from nanbisect.origins import REPLAY as REPLAYED
from nanbisect.outcome import Outcome, Site, Status
from nanbisect.report.origins import origin_line
from nanbisect.run import Driver, Machine, Occasion, run_json
from nanbisect.store import Store
from nanbisect.trainers.registry import TRAINERS
from nanbisect.watch_trace import no_replay
from tests import fakes
from tests.commands import ROOT, nanbisect, result

PYTHON = sys.executable
CPU = Machine({"device": "cpu"}, (), ("cpu0",))


# the demo --------------------------------------------------------------------------------------

DEMO = """
name: traced
trainer: sft
recipe: demo/tts.py
data: demo/train.jsonl
steps: 1
device: cpu
settings: {precision: bf16, learning_rate: 1e-3, padding_side: left, attention: eager, batch_size: 2}
factors: {gradient_checkpointing: [off, on, reentrant]}
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, list[Event]]]:
    """The demo's failing cells, one a level of checkpointing, each run once."""
    home = tmp_path_factory.mktemp("demo")
    shutil.copytree(ROOT / "matrices" / "demo", home / "demo")
    (home / "traced.yaml").write_text(DEMO)
    matrix = application.load(home / "traced.yaml", NO_OVERRIDES)
    trainer, occasion, executor = TRAINERS[matrix.trainer], Occasion(), LocalExecutor(warm=True)
    store = Store.create(home / "run", run_json(matrix, trainer, CPU, occasion))
    heard: list[Event] = []
    driver = Driver(matrix, trainer, executor, store=store, machine=CPU, occasion=occasion)
    driver.run(heard.append)
    yield driver, heard
    executor.close()


@pytest.mark.training
@pytest.mark.parametrize("level", ["off", "on", "reentrant"])
def test_the_demo_is_born_in_the_softmax_of_forward(demo: tuple[Driver, list[Event]], level: str) -> None:
    """Whatever the checkpointing; hidden by the zeroing of padded rows, with the numbers of its input."""
    driver, heard = demo
    cell = next(cell for cell in driver.cells.every if cell.levels["gradient_checkpointing"] == level)
    failure = tracing.failure_of(driver, cell)
    assert failure is not None
    traced = tracing.trace(driver, failure, heard.append)
    assert traced.same_place
    assert traced.outcome.loss == failure.outcome.loss
    kept = driver.store.outcomes(cell)
    origin: Any = kept[0].origin
    assert len(kept) == 1
    assert (origin["operation"], origin["phase"], origin["kind"]) == ("aten._softmax", "forward", "nan")
    assert origin["module"].startswith("decoder.layers.")
    assert origin["source"] == "demo/tts.py:95"
    assert origin["hidden_by"][0]["operation"] == "aten.masked_fill"
    assert origin["inputs"][0]["neginf"] > 0
    assert (origin["step"], origin["way"], origin["channel"]) == (1, "from the start", None)
    assert set(origin["channels"].values()) == {"nan"} and len(origin["channels"]) == 13
    assert isinstance(heard[-1], TraceEnded) and "NaN born in forward: `aten._softmax`" in heard[-1].text
    phases = {link["phase"] for link in origin["chain"]}
    assert ("recompute" in phases) == (level != "off")


@pytest.mark.training
def test_the_command_line_tells_it_and_the_report_shows_it(
    demo: tuple[Driver, list[Event]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1; the sentence, chain and numbers; no path of this machine in the report."""
    folder = demo[0].store.folder
    code = application.rerun(str(folder), "1", repeat=1, changes=(), trace=True, reports=tmp_path)
    out = capfd.readouterr().out
    assert code == 1
    assert "cell 1: ended the same way, at the same place" in out
    assert "NaN born in forward: aten._softmax in decoder.layers." in out
    assert "chain:" in out and "numbers:" in out
    report = (folder / "report.md").read_text()
    assert "### Where it was born" in report
    assert "| aten.\\_softmax | forward | decoder.layers." in report or "aten._softmax" in report
    assert "The loss of each channel brings it by itself (all 13 tried one by one)." in report
    assert str(folder.parent) not in report
    assert result(folder)["cells"][0]["origin"]["phase"] == "forward"
    assert len(result(folder)["cells"][0]["attempts"]) == 1


# which loss, and what comes and goes -----------------------------------------------------------

CHANNELS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = torch.nn.Linear(2, 2), torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(3))

    def forward(self, x):
        hidden = self.body(x)
        return [head(hidden).squeeze(-1) for head in self.heads]

def model(settings):
    return Net()

def records(settings):
    for index in range(4):
        yield {"id": index, "x": [0.1 * index, 0.5]}

def collate(records, settings):
    return {"x": torch.tensor([record["x"] for record in records])}

def losses(model, batch):
    first, second, third = model(batch["x"])
    spread = (third - third).square().sum().sqrt() + third
    return {"text": (first.sum(), len(first)), "a": (second.sum(), len(second)), "b": (spread.sum(), len(third))}
"""
MATRIX = """
name: channels
trainer: sft
recipe: mine.py
steps: 2
device: cpu
settings: {optimizer: OPTIMIZER, gradient_accumulation: 2, precision: fp32, learning_rate: 1e-3}
factors: {batch_size: [1, 2]}
"""


@pytest.mark.training
def test_only_one_channels_loss_brings_it(tmp_path: Path) -> None:
    """Each is tried alone; without an optimizer too, where gradients are freed as they arrive."""
    (tmp_path / "mine.py").write_text(CHANNELS)
    executor = LocalExecutor(warm=True)
    try:
        for optimizer in ("sgd", "none"):
            (tmp_path / "m.yaml").write_text(MATRIX.replace("OPTIMIZER", optimizer))
            matrix = application.load(tmp_path / "m.yaml", NO_OVERRIDES)
            store = Store.create(tmp_path / optimizer, run_json(matrix, TRAINERS["sft"], CPU, Occasion()))
            driver = Driver(matrix, TRAINERS["sft"], executor, store=store, machine=CPU, occasion=Occasion())
            driver.single.again(driver.cells.every[0], seeds=[0], listener=lambda event: None)
            failure = tracing.failure_of(driver, driver.cells.every[0])
            assert failure is not None
            origin: Any = tracing.trace(driver, failure, lambda event: None).origin
            assert origin["channels"] == {"text": None, "a": None, "b": "nan"}, optimizer
            assert origin["channel"] == "b"
            assert "by the loss of channel `b` alone" in origin_line(origin)
    finally:
        executor.close()


def outcome(status: Status, seed: int = 0) -> Outcome:
    """An attempt that ended so."""
    return Outcome(status, "because", seed=seed)


def test_two_attempts_tell_memory_from_kernels() -> None:
    """And nothing where one of them was not judged."""
    bad, good, lost = outcome(Status.NONFINITE), outcome(Status.FINITE), outcome(Status.FAILED)
    assert memory_words(bad, good) == UNWRITTEN
    assert memory_words(good, good) == UNSTABLE
    assert memory_words(bad, bad) == memory_words(good, bad) == NEITHER
    assert "could not be told: because" in memory_words(lost, good)
    assert comes_and_goes((bad, good))
    assert not comes_and_goes((bad, lost, outcome(Status.FINITE, seed=1)))


UNWRITTEN_SCRIPT = """
import sys, pathlib, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x,) in enumerate(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 4)), 2), 1):
    out = model(x).squeeze(-1)
    noise = torch.empty(2)
    if not torch.are_deterministic_algorithms_enabled():
        noise.fill_(0.0 if pathlib.Path("lucky").exists() else float("nan"))  # what malloc may hand out
    elif not torch.utils.deterministic.fill_uninitialized_memory:
        noise.zero_()
    loss = (out + noise).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    pathlib.Path("lucky").touch()
"""
COMMAND = """
name: memory
trainer: command
command: [PYTHON, train.py, "{level}"]
steps: 2
device: cpu
flags: {level: [], batch_size: []}
factors: {level: [a, b]}
"""


@pytest.mark.training
def test_a_buffer_that_nothing_wrote_is_named(tmp_path: Path) -> None:
    """The first attempt had bad luck, the traced one had not: fresh memory filled with NaN makes it certain."""
    (tmp_path / "train.py").write_text(UNWRITTEN_SCRIPT)
    (tmp_path / "m.yaml").write_text(COMMAND.replace("PYTHON", PYTHON))
    matrix = application.load(tmp_path / "m.yaml", NO_OVERRIDES)
    executor = LocalExecutor(warm=True)
    store = Store.create(tmp_path / "run", run_json(matrix, TRAINERS["command"], CPU, Occasion(check=False)))
    occasion = Occasion(check=False)
    driver = Driver(matrix, TRAINERS["command"], executor, store=store, machine=CPU, occasion=occasion)
    try:
        driver.single.again(driver.cells.every[0], seeds=[0], listener=lambda event: None)
        failure = tracing.failure_of(driver, driver.cells.every[0])
        assert failure is not None
        traced = tracing.trace(driver, failure, lambda event: None)
    finally:
        executor.close()
    assert not traced.same_place
    (kept,) = store.outcomes(driver.cells.every[0])
    notes = {note.code: note.text for note in kept.doubts}
    assert "did not fail: attempts disagree" in notes["trace_disagrees"]
    assert notes["comes_and_goes"] == UNWRITTEN
    assert kept.origin is not None and kept.origin["label"] == "unwritten storage"


# in a run --------------------------------------------------------------------------------------

ORIGIN = {
    "kind": "origin", "time": 11.0, "step": 1, "micro_batch": 0, "rank": 0, "found": True, "reason": None,
    "surfaced": {"phase": "backward", "value": "nan", "name": "b", "micro_batch": 0},
    "origin": {"phase": "forward", "kind": "nan", "module": "m", "operation": "aten.log", "source": "/a/b/c.py:3",
               "label": "origin", "node": None, "name": None, "frames": [], "inputs": [], "outputs": [], "rows": [],
               "sample": None, "position": None, "channel": None, "allocated": None, "forward_was_finite": None},
    "chain": [], "chain_length": 0, "nan_at": 0, "hidden_by": [], "before": [], "jumps": [], "kernels": [], "use": None,
    "addends": [], "loaded": [], "operations": 7, "seconds": 0.5, "plain_seconds": 0.25, "traced_in_eager": False,
}  # fmt: skip


def traced_run(folder: Path, *, finds: bool = True) -> tuple[Driver, list[Task]]:
    """A run over a=x|y and b=1|2 that fails where a=y; traced attempts leave an origin or end finite."""
    tasks: list[Task] = []

    def script(task: Task) -> Scripted:
        tasks.append(task)
        bad = json.loads((task.folder / "cell.json").read_text())["levels"]["a"] == "y"
        files = fakes.nonfinite_files() if bad else fakes.finite_files()
        if tracing.STEP in task.env and finds:
            extra = [fakes.AWAKE, fakes.CHECKED, fakes.nonfinite_event(), ORIGIN]
            files = {**files, "events.0.1.jsonl": fakes.lines(*extra)}
        elif tracing.STEP in task.env:
            files = fakes.finite_files()
        return Scripted(exit=Exit("exited", code=0, seconds=1.0), seconds=1.0, files=files)

    executor, matrix, occasion = (
        ScriptedExecutor(script, clock=Clock()),
        fakes.matrix_of(a=("x", "y"), b=("1", "2")),
        Occasion(),
    )
    trainer = fakes.FakeTrainer()
    occasion = replace(occasion, clock=executor.clock, sleep=executor.clock.sleep)
    store = Store.create(folder / "run", run_json(matrix, trainer, fakes.MACHINE, occasion))
    return Driver(matrix, trainer, executor, store=store, machine=fakes.MACHINE, occasion=occasion), tasks


def test_a_trace_fills_the_origin_and_counts_for_nothing(tmp_path: Path) -> None:
    """It is asked for by the probe's step, with the seed of the attempt; the cell still has one attempt."""
    driver, tasks = traced_run(tmp_path)
    driver.run(lambda event: None)
    heard: list[Event] = []
    failure = tracing.failure_of(driver, driver.cells.every[2])
    assert failure is not None
    tracing.trace(driver, failure, heard.append)
    assert [type(event) for event in heard] == [TraceStarted, TraceEnded]
    assert (tasks[-1].env[tracing.STEP], tasks[-1].env["SEED"]) == ("1", "0")
    (kept,) = driver.store.outcomes(driver.cells.every[2])
    assert kept.origin is not None
    assert (kept.origin["operation"], kept.origin["source"]) == ("aten.log", "/a/b/c.py:3")
    assert kept == replace(failure.outcome, origin=kept.origin)


def test_a_traced_attempt_that_does_not_fail_is_no_origin(tmp_path: Path) -> None:
    """Attempts disagree, and two more tell whether memory or a kernel is to blame."""
    driver, tasks = traced_run(tmp_path, finds=False)
    driver.run(lambda event: None)
    failure = tracing.failure_of(driver, driver.cells.every[2])
    assert failure is not None
    traced = tracing.trace(driver, failure, lambda event: None)
    assert traced.origin is None
    levels = [task.env.get(tracing.DETERMINISTIC) for task in tasks[-3:]]
    assert levels == [None, "kernels+fill", "kernels"]
    (kept,) = driver.store.outcomes(driver.cells.every[2])
    assert kept.origin is None
    assert [note.code for note in kept.doubts] == ["trace_disagrees", "comes_and_goes"]
    assert kept.doubts[1].text == UNSTABLE
    tracing.trace(driver, replace(failure, outcome=kept), lambda event: None)
    (kept,) = driver.store.outcomes(driver.cells.every[2])
    assert len(kept.doubts) == 2  # said once


def test_an_interrupted_trace_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome is written in one piece, at the end."""
    driver, _ = traced_run(tmp_path)
    driver.run(lambda event: None)
    before = driver.store.outcomes(driver.cells.every[2])
    failure = tracing.failure_of(driver, driver.cells.every[2])
    assert failure is not None

    def interrupted(handles: Sequence[Handle], seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver.executor, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tracing.trace(driver, failure, lambda event: None)
    assert driver.store.outcomes(driver.cells.every[2]) == before
    assert not driver.attempts.running


# watched commands ------------------------------------------------------------------------------

LATE = """
import pathlib, sys, torch
from torch import nn
print("start", flush=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.arange(640.0).reshape(160, 4) / 640, batch_size=2)
for step, batch in enumerate(data, start=1):
    pathlib.Path("steps").open("a").write(f"{step}\\n")
    out = model(batch)
    loss = out.pow(2).mean()
    if BAD:
        loss = loss + (out - out).abs().sum().sqrt()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
sys.exit(7)
"""
IN_THE_DATA, BY_COUNT = "(batch > 0.487).all() and (batch < 0.5).all()", "step == 4"


def watched(folder: Path, bad: str) -> tuple[int, str, list[str], Any]:
    """Exit code, what was told, the steps trained in all starts together, the JSON."""
    (folder / "train.py").write_text(LATE.replace("BAD", bad))
    done = nanbisect("watch", "--trace", "--json", "seen.json", "--", PYTHON, "train.py", cwd=folder)
    assert done.out == "start\n"  # the second start's output is not shown
    return done.code, done.err, (folder / "steps").read_text().split(), json.loads((folder / "seen.json").read_text())


@pytest.mark.training
def test_a_nan_at_step_40_costs_one_traced_step(tmp_path: Path) -> None:
    """The command is started twice, which is said beforehand, and keeps the code of its first start."""
    code, err, steps, seen = watched(tmp_path, IN_THE_DATA)
    assert code == 7
    assert steps == [*map(str, range(1, 81)), "1", "2"]  # the second is stopped at its second forward
    assert err.startswith("nanbisect: with --trace this command is started once more")
    assert "tracing step 40, replayed from its capsule" in err
    assert "born in backward: aten.div (train.py:" in err
    assert "Step 40 was traced, replayed from its capsule" in err
    assert (seen["origin"]["way"], seen["origin"]["step"], seen["site"]["step"]) == ("replay", 40, 40)


@pytest.mark.training
def test_where_the_replay_does_not_fail_it_starts_anew(tmp_path: Path) -> None:
    """A count of the script's own is in no capsule: that is said, and the step is traced from the start."""
    code, err, steps, seen = watched(tmp_path, BY_COUNT)
    assert code == 7
    assert "the replay of the step did not fail: attempts disagree, and no origin is told" in err
    assert "tracing step 4, from the start with the same seed (the replay did not fail where the step had)" in err
    assert steps[80:] == ["1", "2", "1", "2", "3", "4", "5"]
    assert (seen["origin"]["way"], seen["origin"]["step"]) == ("from the start", 4)


def evidence(*lines: Mapping[str, Any]) -> Evidence:
    """What a watched command left."""
    ending = Ending("exited", 0, None, 1.0, False)
    return Evidence(ending=ending, probe=tuple(lines), diary=(), armed=True, reached=True)


REPLAY = {
    "kind": "replay", "step": 9, "micro_batch": 0, "rank": 0, "refused": None, "handed": 1, "of": 1, "forwards": 1,
    "differs": None, "seconds": 0.1,
}  # fmt: skip
SITE = Site(9, 0, 0, "backward", "nan", ("b",))
BEFORE = Outcome(Status.NONFINITE, "because", site=SITE)
AGAIN = Outcome(Status.NONFINITE, "again", site=replace(SITE, step=1))


@pytest.mark.parametrize(
    ("lines", "now", "said"),
    [
        ([REPLAY], Outcome(Status.FINITE, "fine"), "did not fail: attempts disagree"),
        ([REPLAY, ORIGIN], replace(AGAIN, site=replace(SITE, step=1, phase="loss")), "failed at another place (again)"),
        ([REPLAY, ORIGIN], replace(AGAIN, site=replace(SITE, step=1, parameters=("c",))), "failed at another place"),
        ([{**REPLAY, "differs": 0}], Outcome(Status.FINITE, "fine"), "had other inputs than the step itself"),
        ([{**REPLAY, "refused": "torn"}, ORIGIN], AGAIN, "the capsule can't be played back: torn"),
        ([REPLAY], Outcome(Status.FAILED, "no memory"), "was not judged (no memory)"),
        ([REPLAY, {**ORIGIN, "found": False, "reason": "never reached"}], AGAIN, "no origin found: never reached"),
        ([REPLAY], AGAIN, "no origin found: the traced attempt told nothing"),
    ],
)
def test_no_origin_is_told_of_another_failure(lines: list[Mapping[str, Any]], now: Outcome, said: str) -> None:
    """Only of one at the same place, whatever the trace found."""
    traced = origin_of(evidence(*lines), now, BEFORE, way=REPLAYED)
    assert traced.origin is None
    assert traced.note is not None
    assert said in traced.note.text


def test_an_origin_of_the_same_place_is_told() -> None:
    """Numbered as the step that it repeats; of several ranks, that of the rank on which it began."""
    site = replace(SITE, rank=1)
    other = {**ORIGIN, "rank": 1, "origin": {**ORIGIN["origin"], "operation": "aten.sqrt"}}  # type: ignore[dict-item]
    now = replace(AGAIN, site=replace(site, step=1))
    traced = origin_of(evidence(REPLAY, ORIGIN, other), now, replace(BEFORE, site=site), way=REPLAYED)
    assert traced.origin is not None
    assert (traced.origin["operation"], traced.origin["step"], traced.origin["way"]) == ("aten.sqrt", 9, "replay")
    assert traced.origin["cost"] == {"seconds": 0.5, "plain_seconds": 0.25, "operations": 7}


CAPSULE = {"kind": "capsule", "step": 9, "micro_batch": 0, "rank": 0, "written": True, "reason": None, "bytes": 5}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([CAPSULE], None),
        ([], "no capsule was written"),
        ([{**CAPSULE, "step": 8}], "no capsule was written"),
        ([{**CAPSULE, "written": False, "reason": "there is no room"}], "no capsule: there is no room"),
        ([CAPSULE, {"kind": "self_check", "rank": 0, "world": 2}], "only 1 rank of 2 wrote a capsule"),
        ([CAPSULE, {**CAPSULE, "rank": 1}, {"kind": "self_check", "rank": 0, "world": 2}], None),
    ],
)
def test_a_step_is_replayed_if_every_rank_kept_it(lines: list[Mapping[str, Any]], why: str | None) -> None:
    """Else the reason is told; the first step needs no capsule."""
    event = fakes.nonfinite_event(step=9)
    assert no_replay(evidence(event, *lines)) == why
    assert no_replay(evidence(fakes.nonfinite_event(step=1), CAPSULE)) == "it is the first"


DDP = """
import sys, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.arange(160.0).reshape(40, 4) / 160
sampler = torch.utils.data.distributed.DistributedSampler(rows, shuffle=False)
for step, batch in enumerate(torch.utils.data.DataLoader(rows, 2, sampler=sampler), 1):
    out = model(batch)
    bad = (batch == rows[21]).all(dim=1).any()
    loss = out.pow(2).mean()
    (loss + (out - out).abs().sum().sqrt() if bad else loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.training
def test_two_ranks_replay_their_own_steps(tmp_path: Path) -> None:
    """The NaN is rank 1's; rank 0 gets it by reduction, and keeps its step all the same."""
    (tmp_path / "train.py").write_text(DDP)
    launch = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py")
    done = nanbisect("watch", "--trace", "--json", "seen.json", "--", *launch, cwd=tmp_path)
    assert "on rank 1 of 2" in done.err
    assert "tracing step 6, replayed from its capsule" in done.err, done.err
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["site"]["ranks"]["by_itself"] == [1]
    assert (seen["origin"]["rank"], seen["origin"]["phase"]) == (1, "backward")
    assert seen["origin"]["source"].startswith("train.py:")
