"""The probe under other people's commands: stopping, batches, silent repairs, several ranks, long runs.

Launchers and libraries run as they are, as real processes; small scenarios share one process that imports
torch, as in `test_probe`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.test_probe import Seen, Test, all_seen, environment, read, scenario, seen  # noqa: F401 - two are fixtures

pytestmark = pytest.mark.training

Lines = list[dict[str, Any]]


def kind(lines: Lines, name: str) -> Lines:
    """Events of one kind."""
    return [line for line in lines if line["kind"] == name]


def launch(folder: Path, *argv: str, **limits: str) -> tuple[subprocess.CompletedProcess[str], dict[int, Lines]]:
    """Run a command under the probe; what it left, by rank."""
    events = folder / "events"
    events.mkdir()
    env = environment(events) | limits
    done = subprocess.run(
        [sys.executable, *argv], env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    files = sorted(events.glob("events.*.jsonl"))
    return done, {int(path.name.split(".")[1]): read(path) for path in files}


def truth(out: str) -> list[list[str]]:
    """What the script says that it trained on, line by line."""
    return [line.split()[1:] for line in out.splitlines() if line.startswith("ROWS")]


def free_port() -> str:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return str(probing.getsockname()[1])


ROWS = '''
import os, sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)


class Rows(Dataset):
    """Row i holds token i eight times."""
    def __init__(self, many=16, fields=("input_ids", "labels", "id")):
        self.many, self.fields = many, fields
    def __len__(self):
        return self.many
    def __getitem__(self, i):
        row = torch.full((8,), i)
        labels = row.clone()
        labels[:3] = -100
        full = {"input_ids": row, "labels": labels, "id": "r%d" % i, "attention_mask": (torch.arange(8) > 0).long()}
        return {name: full[name] for name in self.fields}


class Model(nn.Module):
    """A language model of one layer; its loss is NaN where the bad token is."""
    def __init__(self, bad=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.bad = nn.Embedding(32, 8), nn.Linear(8, 32), bad
    def forward(self, input_ids, labels, **ignored):
        logits = self.head(self.embed(input_ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        bad = self.bad is not None and bool((input_ids == self.bad).any())
        return {"loss": loss * float("nan") if bad else loss, "logits": logits}
'''


# launchers -------------------------------------------------------------------------------------

DDP = (
    ROWS
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(Model(bad=5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = Rows()
for number in range(1, 7):
    batch = rows[5 if rank == 1 and number == 2 else 0]
    loss = model(batch["input_ids"][None], labels=batch["labels"][None])["loss"]
    loss.backward()
    if CLIP:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    sys.stdout.write("step %d rank %d\\n" % (number, rank))  # in one piece: the ranks share the pipe
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("clip", [True, False])
def test_torchrun_with_a_bad_record_on_one_rank(tmp_path: Path, clip: bool) -> None:
    (tmp_path / "train.py").write_text(DDP.replace("CLIP", str(clip)))
    argv = ("-m", "torch.distributed.run", "--master_port", free_port(), "--nproc_per_node", "2", "train.py")
    done, ranks = launch(tmp_path, *argv, NANBISECT_STOP="event")
    assert set(ranks) == {0, 1}, done.stderr
    first, other = kind(ranks[1], "nonfinite")[0], kind(ranks[0], "nonfinite")[0]
    assert (first["rank"], first["step"], first["phase"], first["value"]) == (1, 2, "loss", "nan")
    assert (other["rank"], other["step"], other["phase"]) == (0, 2, "reduce")
    for lines in ranks.values():
        assert [(line["why"], line["steps"]) for line in kind(lines, "stopped")] == [("event", 2)]
        assert lines[-1]["kind"] == "exit" and not kind(lines, "probe_error")
    assert "step 2 rank 0" in done.stdout and "step 3" not in done.stdout


FSDP2 = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
model[1].register_full_backward_pre_hook(lambda _, grads: (grads[0] * (float("nan") if dist.get_rank() else 1.0),))
for part in model:
    fully_shard(part, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for number in range(3):
    model(torch.randn(2, 4)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_sharded_parameters_are_seen_before_reduction_and_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FSDP2)
    argv = ("-m", "torch.distributed.run", "--master_port", free_port(), "--nproc_per_node", "2", "train.py")
    done, ranks = launch(tmp_path, *argv, NANBISECT_STOP="event")
    assert set(ranks) == {0, 1}, done.stderr
    first, other = kind(ranks[1], "nonfinite")[0], kind(ranks[0], "nonfinite")[0]
    assert (first["phase"], first["tensors"][0]["name"]) == ("backward", "1.bias")
    assert other["phase"] == "reduce" and kind(ranks[0], "step")[0]["bad"] == []
    assert not [line for lines in ranks.values() for line in lines if line["kind"] in ("probe_error", "repair")]


ACCELERATE = (
    ROWS
    + """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2)
model = Model(bad=None)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Rows(many=32, fields=("input_ids", "labels", "id")), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
for batch in loader:
    with accelerator.accumulate(model):
        rows = batch.pop("id")
        sys.stdout.write("ROWS %d %s\\n" % (accelerator.process_index, " ".join(rows)))  # in one piece
        sys.stdout.flush()
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            step += 1
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        sys.stdout.write("step %d of %d\\n" % (step, accelerator.num_processes))
"""
)


@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_launch_pairs_batches_and_stops_after_the_last_line(tmp_path: Path, processes: int) -> None:
    (tmp_path / "train.py").write_text(ACCELERATE)
    alone = ("--num_processes", "1", "--cpu")
    several = ("--multi_gpu", "--num_processes", "2", "--main_process_port", free_port())
    argv = ("-m", "accelerate.commands.launch", *(alone if processes == 1 else several), "train.py")
    done, ranks = launch(tmp_path, *argv, ACCELERATE_USE_CPU="true", NANBISECT_STOP="event", NANBISECT_STEPS="2")
    assert set(ranks) == set(range(processes)), done.stderr
    assert f"step 2 of {processes}" in done.stdout and "step 3" not in done.stdout
    for rank, lines in ranks.items():
        batches = kind(lines, "batch")
        served = [rows for number, *rows in truth(done.stdout) if number == str(rank)]
        assert [line["records"] for line in batches] == served[: len(batches)] and len(batches) == 4
        assert [[f"r{i}" for i in line["indices"]] for line in batches] == served[:4]
        assert {line["matched"] for line in batches} == {"content"}
        places = [(1, 0), (1, 1), (2, 0), (2, 1)]
        assert [(line["step"], line["micro_batch"]) for line in batches] == places
        assert batches[0]["shapes"] == {"input_ids": [2, 8], "labels": [2, 8]}
        assert {line["valid_labels"] for line in batches} == {10}
        assert kind(lines, "stopped")[0]["why"] == "steps" and lines[-1]["steps"] == 2


TRAINER = (
    ROWS
    + """
from transformers import Trainer, TrainingArguments


class Told(Model):
    def forward(self, input_ids, labels, attention_mask, **more):
        print("ROWS", *(str(int(row[0])) for row in input_ids), flush=True)
        return super().forward(input_ids, labels)


arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, max_steps=4,
    report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_nan_inf_filter=True,
)
rows = Rows(fields=("input_ids", "labels", "attention_mask"))
trainer = Trainer(Told(bad=int(sys.argv[1])), arguments, train_dataset=rows)
trainer.train()
print("done")
"""
)


def test_the_trainers_filter_is_named_with_the_raw_loss(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    done, ranks = launch(tmp_path, "train.py", "5", NANBISECT_STOP="event")
    (lines,) = ranks.values()
    event, batches = kind(lines, "nonfinite")[0], kind(lines, "batch")
    served = truth(done.stdout)
    place = next(number for number, rows in enumerate(served) if "5" in rows)
    assert (event["step"], event["micro_batch"]) == (place // 2 + 1, place % 2)
    assert (event["phase"], event["value"]) == ("loss", "nan")
    assert [[str(i) for i in line["indices"]] for line in batches] == served  # it fetches a whole window ahead
    assert batches[0]["padding"] == 2 and batches[0]["valid_labels"] == 10 and batches[0]["records"] is None
    (repair,) = [line for line in kind(lines, "repair") if line["code"] == "loss_filtered"]
    assert repair["values"]["raw"] == "nan" and isinstance(repair["values"]["logged"], float)
    assert repair["step"] == event["step"] and "logging_nan_inf_filter" in repair["text"]
    assert kind(lines, "stopped")[0]["why"] == "event" and lines[-1]["kind"] == "exit"
    assert done.returncode == 0 and "done" not in done.stdout


WORKERS = (
    ROWS
    + """
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        model = Model()
        loader = DataLoader(Rows(8), batch_size=2, shuffle=True, num_workers=2, multiprocessing_context=method)
        for batch in loader:
            print("ROWS", *batch["id"], flush=True)
            model(batch["input_ids"], batch["labels"])["loss"].backward()
"""
)


def test_data_loader_workers_leave_no_file_and_do_not_hang_a_stop(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKERS)
    done, ranks = launch(tmp_path, "train.py", NANBISECT_STOP="", NANBISECT_BACKWARDS="6")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "events").glob("events.*"))) == 1
    batches, told = kind(ranks[0], "batch"), truth(done.stdout)
    assert [line["records"] for line in batches] == told[:6] and len(told) == 7  # four by fork, three by spawn
    assert [[f"r{i}" for i in line["indices"]] for line in batches] == told[:6]
    assert kind(ranks[0], "stopped")[0]["why"] == "backwards" and ranks[0][-1]["kind"] == "exit"


@pytest.mark.parametrize(("ending", "kinds"), [("raise ValueError('mine')", 1), ("sys.exit(3)", 0), ("pass", 0)])
def test_an_error_that_ended_the_script_stands_before_the_last_line(tmp_path: Path, ending: str, kinds: int) -> None:
    script = (
        f"{ROWS}\nmodel = Model()\nrow = Rows()[0]\nmodel(row['input_ids'][None], row['labels'])['loss'].backward()"
    )
    (tmp_path / "train.py").write_text(f"{script}\n{ending}\n")
    _, ranks = launch(tmp_path, "train.py")
    assert len(kind(ranks[0], "raised")) == kinds and ranks[0][-1]["kind"] == "exit"
    assert all("mine" in line["error"] for line in kind(ranks[0], "raised"))


# stopping --------------------------------------------------------------------------------------

LIMIT = """
def limit(**wanted):
    module = sys.modules["_nanbisect_probe.limits"]
    observer = probe()._observer
    observer.stopper.limits = module.limits(wanted)
    observer.journal.every_line = observer.stopper.limits.every_line
"""


def limited(script: str) -> Callable[[Test], Test]:
    """A scenario that may set limits (the process that runs them all was started without)."""
    return scenario("    " + LIMIT.replace("\n", "\n    ").rstrip() + script)


@limited("""
    limit(NANBISECT_STOP="event", NANBISECT_STEPS="2")
    model, optimizer = net()
    log = []
    try:
        for number in range(9):
            for micro in range(2):
                model(x()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            log.append(number)
    finally:
        note(log=log)
""")
def test_a_stop_after_n_steps_lets_the_last_log_line_out(seen: Seen) -> None:  # noqa: F811
    assert seen.note == {"log": [0, 1]} and seen.code == 0
    (stopped,) = seen.kind("stopped")
    assert (stopped["why"], stopped["steps"], stopped["backwards"], stopped["forced"]) == ("steps", 2, 4, False)
    assert seen.lines[-1]["kind"] == "exit" and seen.lines[-1]["steps"] == 2


@limited("""
    limit(NANBISECT_STOP="event", NANBISECT_STEPS="1")
    model, optimizer = net()
    while True:
        try:
            step(model, optimizer)
        except BaseException:
            continue
""")
def test_a_swallowed_stop_is_repeated_and_then_forced(seen: Seen) -> None:  # noqa: F811
    assert seen.code == 0
    assert [(line["tries"], line["forced"]) for line in seen.kind("stopped")] == [(1, False), (4, True)]
    assert seen.lines[-1]["kind"] == "exit" and seen.lines[-1]["steps"] == 1


CONTINUE = """
    model, optimizer = net(nan)
    count = 0
    try:
        for _ in range(9):
            count += 1
            model(x()).square().mean().backward()
            if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.zero_grad()
                continue
            optimizer.step()
    finally:
        note(count=count)
"""


@limited('\n    limit(NANBISECT_STOP="", NANBISECT_STEPS="3")' + CONTINUE)
def test_a_script_that_skips_bad_batches_is_stopped_by_backward_calls(seen: Seen) -> None:  # noqa: F811
    (stopped,) = seen.kind("stopped")
    assert (stopped["why"], stopped["steps"], stopped["backwards"]) == ("backwards", 0, 3)
    assert seen.note == {"count": 4} and seen.ended == ["dropped"] * 3


@limited('\n    limit(NANBISECT_STOP="event", NANBISECT_STEPS="3")' + CONTINUE)
def test_the_first_event_stops_at_the_next_forward(seen: Seen) -> None:  # noqa: F811
    (stopped,) = seen.kind("stopped")
    assert (stopped["why"], stopped["backwards"]) == ("event", 1) and seen.note == {"count": 2}


@limited("""
    import threading
    limit(NANBISECT_STOP="event", NANBISECT_STEPS="2")
    model, optimizer = net()
    def work():
        while True:
            step(model, optimizer)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    note(joined=True)
""")
def test_training_in_a_thread_ends_the_process(seen: Seen) -> None:  # noqa: F811
    assert seen.code == 0 and seen.note == {}
    assert [(line["steps"], line["forced"]) for line in seen.kind("stopped")] == [(2, True)]
    assert seen.ended == ["step", "step"] and seen.lines[-1]["kind"] == "exit"


# batches ---------------------------------------------------------------------------------------


@scenario("""
    from torch.utils.data import DataLoader, TensorDataset
    model, optimizer = net()
    data = TensorDataset(torch.randn(12, 4), torch.arange(12))
    loader, told = DataLoader(data, batch_size=2, shuffle=True), []
    ahead = list(loader)  # all served before the first forward
    for features, rows in ahead[1:]:  # the first is never used
        told.append(rows.tolist())
        model(features).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            [model(each) for each, _ in DataLoader(data, batch_size=3)]
        optimizer.zero_grad()
    note(told=told)
""")
def test_batches_served_ahead_skipped_or_evaluated_are_told_apart(seen: Seen) -> None:  # noqa: F811
    batches = seen.kind("batch")
    assert [line["indices"] for line in batches] == seen.note["told"] and len(batches) == 5
    assert {line["matched"] for line in batches} == {"content"} and batches[0]["shapes"] == {"0": [2, 4]}


@scenario("""
    from torch.utils.data import DataLoader
    rows = [{"x": torch.full((4,), float(i)), "uid": 100 + i, "ids": torch.arange(4)} for i in range(6)]
    model, optimizer = net()
    for batch in DataLoader(rows, batch_size=2, sampler=[4, 1, 0, 5]):
        model(batch["x"].double().float() * 1.5).square().mean().backward()  # nothing of it is handed on as it is
        optimizer.step()
        optimizer.zero_grad()
""")
def test_ids_are_one_a_row_and_order_alone_is_said(seen: Seen) -> None:  # noqa: F811
    batches = seen.kind("batch")
    assert [line["records"] for line in batches] == [["104", "101"], ["100", "105"]]
    assert [line["indices"] for line in batches] == [[4, 1], [0, 5]]
    assert [line["matched"] for line in batches] == ["order", "order"]


@scenario("""
    from torch.utils.data import DataLoader, IterableDataset
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.full((4,), float(i)), "record_id": "s%d" % i} for i in range(4)])
    model, optimizer = net()
    for batch in DataLoader(Stream(), batch_size=2):
        model(batch["x"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""")
def test_a_stream_has_records_and_no_indices(seen: Seen) -> None:  # noqa: F811
    batches = seen.kind("batch")
    assert [line["records"] for line in batches] == [["s0", "s1"], ["s2", "s3"]]
    assert [line["indices"] for line in batches] == [None, None]


@scenario("""
    from torch.utils.data import DataLoader
    model, optimizer = net()
    rows = [{"x": torch.full((4,), math.nan if i == 2 else float(i)), "id": "r%d" % i} for i in range(4)]
    for batch in DataLoader(rows, batch_size=1):
        loss = model(batch["x"]).square().mean()
        if not loss.isfinite():
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""")
def test_a_skipped_loss_is_an_event_of_its_batch(seen: Seen) -> None:  # noqa: F811
    assert seen.repairs == ["forward_without_backward"]
    event = seen.nonfinite
    assert (event["phase"], event["value"], event["step"], event["backward"]) == ("loss", "nan", 3, False)
    batches = [(line["records"], line["micro_batch"], line["backward"]) for line in seen.kind("batch")]
    assert batches == [(["r0"], 0, True), (["r1"], 0, True), (["r3"], 0, True), (["r2"], 0, False)]


@scenario("""
    from torch.utils.data import DataLoader
    class Whole(Net):
        def forward(self, x):
            return {"loss": super().forward(x).square().mean()}
    model = Whole()
    rows = [torch.full((4,), math.nan if i == 2 else float(i)) for i in range(4)]
    for batch in DataLoader(rows, batch_size=1):
        loss = model(batch)["loss"]
        if loss.isfinite():
            loss.backward()
""")
def test_the_loss_of_a_skipped_batch_is_told_where_the_module_returns_it(seen: Seen) -> None:  # noqa: F811
    (repair,) = seen.kind("repair")
    assert repair["code"] == "forward_without_backward" and repair["values"] == {"loss": "nan"}


@scenario("""
    from torch.utils.data import DataLoader
    cell = nn.GRUCell(4, 4)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    for batch in list(DataLoader(torch.randn(6, 5, 4), batch_size=2)):
        hidden = torch.zeros(2, 4)
        for part in range(5):
            hidden = cell(batch[:, part], hidden)
        hidden.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""")
def test_a_recurrent_cell_takes_no_batch_that_is_not_its_own(seen: Seen) -> None:  # noqa: F811
    assert [line["indices"] for line in seen.kind("batch")] == [[0, 1], None, None] and not seen.repairs


@scenario("""
    from torch.utils.data import DataLoader
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.heads = nn.ModuleList([nn.Linear(4, 4) for _ in range(26)])
        def forward(self, x, attention_mask):
            return self.body(x)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.tensor([0, 1])
    rows = [{"x": torch.full((4,), float(i)), "attention_mask": mask, "id": i} for i in range(24)]
    for number, batch in enumerate(DataLoader(rows, batch_size=1, shuffle=True), start=1):
        hidden = model(batch["x"], attention_mask=batch["attention_mask"])
        sum(head(hidden).square().mean() for head in model.heads).backward()  # called by the script, one by one
        if number % 12 == 0:
            optimizer.step()
            optimizer.zero_grad()
""")
def test_parts_of_the_model_called_by_the_script_hide_no_batch(seen: Seen) -> None:  # noqa: F811
    batches = seen.kind("batch")
    assert {line["module"] for line in batches} == {"Heads"} and {line["padding"] for line in batches} == {1}
    assert sorted(int(line["records"][0]) for line in batches) == list(range(24))
    assert [(line["step"], line["micro_batch"]) for line in batches] == [(s, m) for s in (1, 2) for m in range(12)]


@scenario("""
    from torch.utils.data import DataLoader
    cell, (model, optimizer) = nn.GRUCell(4, 4), net()
    batches = iter(DataLoader([{"x": torch.full((4,), float(i)), "id": i} for i in range(8)], batch_size=2))
    first = next(batches)["x"]
    hidden = cell(first)
    for part in range(99):
        hidden = cell(first + part + 0.25, hidden)
    hidden.square().mean().backward()  # the batch is in the first of a hundred forwards
    for part in range(99):
        model(x())
    model(next(batches)["x"]).square().mean().backward()  # and here in the last
    optimizer.step()
""")
def test_of_very_many_forwards_the_first_and_the_latest_count(seen: Seen) -> None:  # noqa: F811
    assert [line["records"] for line in seen.kind("batch")] == [["0", "1"], ["2", "3"]]


@scenario("""
    from torch.utils.data import DataLoader
    class Odd(dict):
        def items(self):
            raise RuntimeError("not for you")
    model, optimizer = net()
    for batch in DataLoader([x()], collate_fn=lambda rows: Odd(x=rows[0]), batch_size=1):
        model(batch["x"]).square().mean().backward()
""")
def test_a_batch_that_cannot_be_described_is_no_error(seen: Seen) -> None:  # noqa: F811
    (line,) = seen.kind("batch")
    assert line["indices"] is None and line["shapes"] == {"0": [2, 4]}


@scenario("""
    import multiprocessing
    def work():
        model, optimizer = net()
        step(model, optimizer)
        model(x()).square().mean().backward()
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    note(child=process.pid)
""")
def test_a_forked_process_of_multiprocessing_leaves_its_last_line(seen: Seen) -> None:  # noqa: F811
    child = seen.of_process(seen.note["child"])
    assert [line["ended"] for line in kind(child, "step")] == ["step", "exit"]
    assert child[-1]["kind"] == "exit" and len(kind(child, "exit")) == 1


# silent repairs, partial sight, clipping -------------------------------------------------------


@scenario("""
    model, optimizer = net()
    model.aside = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
""")
def test_parameters_without_a_gradient_are_named_once(seen: Seen) -> None:  # noqa: F811
    (repair,) = seen.kind("repair")
    assert (repair["code"], repair["step"]) == ("no_gradient", 1)
    assert repair["tensors"] == ["aside.weight", "aside.bias"] and seen.lines[-1]["repairs"] == {"no_gradient": 1}


@scenario("""
    os.makedirs(os.path.join(HERE, "fake", "transformers"), exist_ok=True)
    open(os.path.join(HERE, "fake", "transformers", "__init__.py"), "w").close()
    with open(os.path.join(HERE, "fake", "transformers", "trainer.py"), "w") as file:
        file.write("class Trainer:\\n    said = []\\n")
        file.write("    def log(self, logs, start_time=None):\\n        self.said.append(logs)\\n")
    sys.path.insert(0, os.path.join(HERE, "fake"))
    from transformers.trainer import Trainer
    class Own(Trainer):
        def log(self, logs, *more):
            super().log({**logs, "more": 1}, *more)
    model, optimizer = net(nan)
    step(model, optimizer, clip=1.0)
    Own().log({"loss": 0.0, "grad_norm": NAN}, 0.0)
    Own().log({"loss": 2.0, "grad_norm": torch.tensor(1.0)})
    Own().log({"eval_loss": 0.0})
    note(said=len(Trainer.said))
""")
def test_a_loss_of_zero_beside_a_nan_norm_is_told(seen: Seen) -> None:  # noqa: F811
    (repair,) = seen.kind("repair")
    assert (repair["code"], repair["step"]) == ("zero_loss_with_bad_norm", 1)
    assert repair["values"] == {"logged": 0.0, "norm": "nan"} and seen.note == {"said": 3}


@scenario("""
    class Engine(Net):
        def zero_optimization_stage(self):
            return 2
    Engine.__module__ = "deepspeed.runtime.engine"
    model = Engine()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
""")
def test_partitioned_gradients_are_said_to_be_seen_in_part(seen: Seen) -> None:  # noqa: F811
    (partial,) = seen.kind("partial")
    assert "ZeRO stage 2" in partial["reason"]


@scenario("""
    from torch.nn.utils import clip_grad
    model, optimizer = net(nan)
    model(x()).square().mean().backward()
    norm = clip_grad._get_total_norm([p.grad for p in model.parameters()])
    clip_grad._clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    model, optimizer = net(nan)
    model(x()).square().mean().backward()
    clip_grad._get_total_norm([p.grad for p in model.parameters()])  # and no clipping
    optimizer.step()
""")
def test_the_two_halves_of_clipping(seen: Seen) -> None:  # noqa: F811
    first, second = seen.steps
    assert first["norm"] == second["norm"] == "nan" and second["clip"] is None
    assert first["clip"]["call"] == "clip_grads_with_norm_" and first["after_clip"]["parameters_bad"] == 6


@scenario("""
    import warnings
    warnings.simplefilter("ignore")
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.fsdp import FullyShardedDataParallel
    model, _ = net(nan)
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x()).square().mean().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
""")
def test_fsdp_clips_by_a_method_of_its_own(seen: Seen) -> None:  # noqa: F811
    assert seen.code == 0, seen.err
    (line,) = seen.steps
    assert line["clip"]["call"] == "clip_grad_norm_" and line["norm"] == "nan"
    event = seen.kind("nonfinite")[0]
    assert event["phase"] == "backward" and "no_gradient" not in seen.repairs
    assert event["tensors"][0]["name"] == "flat(first.weight, first.bias, second.weight, second.bias, ...)"


# long runs -------------------------------------------------------------------------------------


@limited("""
    limit(NANBISECT_STOP="")
    model, optimizer = net()
    data = iter(torch.utils.data.DataLoader([torch.full((4,), float(i)) / 400 for i in range(400)]))
    for number in range(1, 321):
        model.burn = nan if number == 170 else lambda x: x
        model(next(data)).square().mean().backward()
        if number == 170:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    note(done=True)
""")
def test_a_long_run_writes_few_lines_and_those_around_the_event(seen: Seen) -> None:  # noqa: F811
    around = [169, 170, 171, 172]
    assert [line["step"] for line in seen.steps] == [*range(1, 51), 100, *around, 200, 300]
    batches = [line for line in seen.kind("batch") if line["step"] > 50]
    assert [(line["step"], line["indices"]) for line in batches] == [(step, [step - 1]) for step in around]
    assert not seen.kind("stopped") and seen.note == {"done": True}
    last: Mapping[str, Any] = seen.lines[-1]
    assert (last["steps"], last["backwards"], last["events"]) == (319, 320, 1)
    assert json.loads(json.dumps(last["repairs"])) == {"dropped_step": 1}
