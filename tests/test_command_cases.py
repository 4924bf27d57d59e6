"""Training scripts as people write them, unmodified, each with its own way to hide or to survive a NaN.

Real processes throughout. What each script says of itself is read from its log and compared with what
nanbisect says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Done, nanbisect, result

pytestmark = pytest.mark.training
PYTHON = sys.executable
HEAD = """
import argparse, os, sys, torch
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1)
torch.manual_seed(0)
parser = argparse.ArgumentParser()


class Born(torch.autograd.Function):
    \"\"\"The identity; in backward every element, or the first, becomes `value`.\"\"\"
    @staticmethod
    def forward(ctx, x, value, whole):
        ctx.value, ctx.whole = value, whole
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        (grad if ctx.whole else grad.view(-1)[:1]).fill_(ctx.value)
        return grad, None, None
"""


def started(folder: Path, script: str, matrix: str, *arguments: str) -> tuple[Done, dict[str, Any]]:
    """Run a matrix over a script; its result."""
    (folder / "train.py").write_text(HEAD + script)
    (folder / "case.yaml").write_text(f"name: case\ntrainer: command\ndevice: cpu\nsteps: 3\n{matrix}")
    done = nanbisect("run", "case.yaml", "--out", "out", *arguments, cwd=folder, env={"OMP_NUM_THREADS": "1"})
    assert (folder / "out" / "result.json").is_file(), done.out + done.err
    return done, result(folder / "out")


def command(*words: str) -> str:
    return f"command: {json.dumps([PYTHON, 'train.py', *words])}\n"


def cells(data: dict[str, Any], factor: str) -> dict[str, dict[str, Any]]:
    """Cells by their level."""
    return {cell["levels"][factor]: cell for cell in data["cells"]}


def log(folder: Path, level: str) -> str:
    """What the script of a cell said."""
    (path,) = (folder / "out" / "cells").glob(f"*{level}-*/attempt-1/log.txt")
    return path.read_text()


def codes(notes: list[dict[str, str]]) -> list[str]:
    return [note["code"] for note in notes]


# clips first, looks afterwards -----------------------------------------------------------------

CLIPS_FIRST = """
parser.add_argument("--born", default="none")
born = parser.parse_args().born


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, ids, bad):
        x = self.embed_tokens(ids)
        for number, layer in enumerate(self.layers):
            weight, here = layer.weight, number == 2 and bad
            if here and born == "inf":  # one element of one gradient
                weight = Born.apply(weight, float("inf"), False)
            x = torch.tanh(F.linear(x, weight, layer.bias))
            if here and born == "nan":
                x = Born.apply(x, float("nan"), True)
        return self.head(x)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [{"ids": torch.full((4,), i), "id": f"utt{i}"} for i in range(8)]
for step, batch in enumerate(torch.utils.data.DataLoader(rows, batch_size=2), 1):
    loss = F.cross_entropy(model(batch["ids"], step == 2).flatten(0, 1), batch["ids"].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not norm.isfinite():
        bad = {n: (~p.grad.isfinite()).sum().item() for n, p in model.named_parameters()}
        first = next(n for n in bad if bad[n])
        rest = sum(p.grad.nan_to_num(0.0).abs().sum().item() for p in model.parameters())
        print(f"norm {norm.item()} first_nonfinite_grad={first} bad={bad[first]} rest={rest}", flush=True)
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_clips_first_and_names_the_first_bad_parameter(tmp_path: Path) -> None:
    """Its line blames the embedding for a NaN of layer 2; with an Inf norm all is 0 but one element."""
    matrix = command() + 'flags: {born: [--born, "{value}"]}\nfactors: {born: [none, nan, inf]}\n'
    done, data = started(tmp_path, CLIPS_FIRST, matrix)
    assert done.code == 1
    found = cells(data, "born")
    assert {level: cell["status"] for level, cell in found.items()} == {
        "none": "finite", "nan": "nonfinite", "inf": "nonfinite",
    }  # fmt: skip
    assert "norm nan first_nonfinite_grad=embed_tokens.weight bad=128 rest=0.0" in log(tmp_path, "nan")
    assert "norm inf first_nonfinite_grad=layers.2.weight bad=1 rest=0.0" in log(tmp_path, "inf")
    for level, kind, first, blamed in (
        ("nan", "nan", "layers.2.bias", {"blamed": "embed_tokens.weight", "bad": 128, "numel": 128}),
        ("inf", "+inf", "layers.2.weight", {"blamed": "layers.2.weight", "bad": 1, "numel": 64}),
    ):
        site = found[level]["site"]
        assert (site["step"], site["phase"], site["kind"], site["parameters"][0]) == (2, "backward", kind, first)
        assert found[level]["smear"] == {**blamed, "first": first}
        assert found[level]["suspects"] == ["utt2", "utt3"]
    assert codes(found["inf"]["repairs"]) == ["dropped_step", "zero_after_inf"]
    report = (tmp_path / "out" / "report.md").read_text()
    for said in (
        "blamed embed_tokens.weight (128 of 128 elements); the first gradient to arrive non-finite was layers.2.bias",
        "Such a check would mislead in 1 of 2 failing cells.",
        "the gradient norm was Inf, so clipping set every finite gradient to 0",
    ):
        assert said in report.replace("\\_", "_"), report
        assert said.split(";")[0] in done.out


def test_an_inf_norm_watched(tmp_path: Path) -> None:
    """The command goes on to its own end, and its line stands beside ours (`test_watch` has the NaN)."""
    (tmp_path / "train.py").write_text(HEAD + CLIPS_FIRST)
    done = nanbisect("watch", "--", PYTHON, "train.py", "--born", "inf", cwd=tmp_path)
    assert (done.code, done.out.count("first_nonfinite_grad=layers.2.weight bad=1 rest=0.0")) == (0, 1)
    said = "blamed layers.2.weight (1 of 64 elements) too: that is where the first non-finite gradient arrived"
    assert said in done.err
    assert "zero_after_inf: the gradient norm was Inf, so clipping set every finite gradient to 0" in done.err


# ways to end and to repair ---------------------------------------------------------------------

WAYS = """
parser.add_argument("--way")
way = parser.parse_args().way
CHECKS = ("check", "exit_now", "skip", "swallow")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        if way == "aside":
            self.aside = nn.Linear(4, 4)
    def forward(self, x, bad=False):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(Born.apply(x, float("nan"), True) if bad else x)


class Half(torch.autograd.Function):
    \"\"\"The identity; gradients pass through fp16, so large ones overflow.\"\"\"
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad.half().float()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.linspace(0, 1, 64).reshape(16, 4), batch_size=2)


def settles():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for batch in loader:
        scaler.scale(Half.apply(model(batch)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def one(step, batch):
    loss = model(batch, bad=step == 2 and way in ("none", "zero", "raises")).square().mean()
    if step == 2 and way in CHECKS:
        loss = loss * float("nan")
    if not loss.isfinite():
        if way == "exit_now":
            os._exit(0)
        if way == "skip":
            return
        raise FloatingPointError(f"loss {loss.item()} in step {step}")
    (loss * 0 if way == "zero" and step == 2 else loss).backward()
    bad = [p for p in model.parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if way == "raises" and bad:
        raise FloatingPointError(f"gradient in step {step}")
    if way == "none":
        for parameter in bad:
            parameter.grad = None
    if way == "zero":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if way == "crash" and step == 2:
        sys.stderr.write("fatal: shard 3 of the data is gone\\n")
        sys.exit(3)


def train():
    for step, batch in enumerate(loader, 1):
        try:
            one(step, batch)
        except BaseException:
            if way != "swallow":
                raise


if way == "settles":
    settles()
else:
    train()
"""
LOST = "nan in loss of step 2, micro-batch 0, which the script did not hand to backward"
EXPECTED = {  # status, what its reason says, codes of repairs, codes of doubts
    "settles": ("finite", "", [], ["scaler_skip"]),
    "aside": ("finite", "", ["no_gradient"], []),
    "raises": ("nonfinite", "nan in backward of step 2", [], []),
    "check": ("nonfinite", LOST, ["forward_without_backward"], []),
    "exit_now": ("nonfinite", LOST, ["forward_without_backward"], []),
    "swallow": ("nonfinite", LOST, ["forward_without_backward"], []),
    "skip": ("nonfinite", LOST, ["forward_without_backward"], []),
    "none": ("nonfinite", "nan in backward of step 2", ["gradients_set_to_none"], []),
    "zero": ("nonfinite", "nan in backward of step 2", ["zero_loss_with_bad_norm"], []),
    "crash": ("failed", "exited with code 3; its log ends with: fatal: shard 3 of the data is gone", [], []),
}


def test_every_way_to_end_and_to_repair(tmp_path: Path) -> None:
    """Each under its own name, each repair a line; nothing that saw a NaN is finite."""
    matrix = command() + f'flags: {{way: [--way, "{{value}}"]}}\nfactors: {{way: [{", ".join(EXPECTED)}]}}\n'
    done, data = started(tmp_path, WAYS, matrix, "--jobs", "2")
    assert done.code == 1
    for level, cell in cells(data, "way").items():
        status, reason, repairs, doubts = EXPECTED[level]
        assert (cell["status"], codes(cell["repairs"]), codes(cell["doubts"])) == (status, repairs, doubts), cell
        assert reason in cell["reason"]
    assert len(cells(data, "way")["settles"]["loss"]) == 6, "three skipped, and the three that are wanted"
    page = (tmp_path / "out" / "report.md").read_text().replace("\\_", "_")
    for said in (
        "the GradScaler skipped a step 3 times, at scales 262144 to 65536",
        "2 parameters that require a gradient had none at the first step: aside.weight, aside.bias",
        "1 batch had a forward and no backward; the loss was nan",
        "4 non-finite gradients were set to None before the optimizer",
        "the loss handed to backward was 0.0, and the gradient norm was nan",
    ):
        assert said in done.out
        assert said in page
    assert "the end of the log of cell 10\n  fatal: shard 3 of the data is gone" in done.out


def test_a_failure_of_its_own_is_not_finite_under_watch_either(tmp_path: Path) -> None:
    """What was seen before is said; the exit code stays the command's."""
    (tmp_path / "train.py").write_text(HEAD + WAYS)
    done = nanbisect("watch", "--json", "seen.json", "--", PYTHON, "train.py", "--way", "crash", cwd=tmp_path)
    assert done.code == 3
    assert "finite so far, in 2 steps (2 backward passes); then the training exited with code 3" in done.err
    assert json.loads((tmp_path / "seen.json").read_text())["status"] == "failed"


# the same records ------------------------------------------------------------------------------

POSITION = """
parser.add_argument("--batch", type=int)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--order", default="loader")
args = parser.parse_args()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = torch.arange(24.0).unsqueeze(1).expand(24, 4) / 24
if args.order == "slices":
    batches = list(rows.split(args.batch))
else:
    batches = torch.utils.data.DataLoader(rows, batch_size=args.batch, shuffle=args.order == "shuffle")
for step, batch in zip(range(args.steps), batches):
    loss = model(batch).mean()
    if (batch == 5 / 24).any():  # the record at position 6
        loss = Born.apply(loss, float("nan"), True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step + 1, flush=True)
"""


@pytest.mark.parametrize(
    ("order", "told", "levels", "failed"),
    [
        ("loader", True, (1, 2, 8), {1: 6, 2: 3, 8: 1}),  # batch size -> step of the NaN
        ("shuffle", True, (1, 8), None),  # every row is met somewhere
        ("loader", False, (1, 8), {8: 1}),
        ("slices", False, (1, 8), {8: 1}),
    ],
)
def test_the_place_of_a_bad_record_is_not_the_batch_size(
    tmp_path: Path, order: str, told: bool, levels: tuple[int, ...], failed: dict[int, int] | None
) -> None:
    """Batch size 1 does 24 steps where 8 does 3; a script with three steps of its own does not get that far."""
    words = command("--order", order, *(("--steps", "{steps}") if told else ()))
    matrix = f'{words}flags: {{batch_size: [--batch, "{{value}}"]}}\nfactors: {{batch_size: {list(levels)}}}\n'
    _, data = started(tmp_path, POSITION, matrix)
    met = {int(n): cell["site"]["step"] for n, cell in cells(data, "batch_size").items() if cell["site"]}
    assert met == failed or (failed is None and set(met) == set(levels))
    assert data["causes"] == []
    assert ("different_records" in codes(data["cautions"])) == (len(met) < len(levels))
    assert ("fewer_steps" in codes(data["cautions"])) == (not told)


# transformers' Trainer -------------------------------------------------------------------------

TRAINER = """
parser.add_argument("--bad", action="store_true")
parser.add_argument("--logging", type=int, default=500)
args = parser.parse_args()
from transformers import Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return {"input_ids": torch.full((4,), i), "labels": torch.full((4,), i)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss * float("nan") if args.bad and (input_ids == 2).any() else loss, "logits": logits}


class Ordered(Trainer):
    def _get_train_sampler(self, *more, **others):
        return torch.utils.data.SequentialSampler(self.train_dataset)


arguments = TrainingArguments(
    output_dir="unused", per_device_train_batch_size=1, logging_steps=args.logging, max_steps=4, report_to=[],
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)
Ordered(Model(), arguments, train_dataset=Rows()).train()
"""


def test_the_trainers_filter_hides_a_loss(tmp_path: Path) -> None:
    """On by default, and it logs every 500 steps: a cell has ended by then, so the filter is named without a log."""
    matrix = "flags: {bad: {off: [], on: [--bad]}}\nfactors: {bad: [on, off]}\nexclude: [{bad: off}]\n"
    done, data = started(tmp_path, TRAINER, command() + matrix)
    (cell,) = data["cells"]
    assert (cell["status"], cell["loss"][-1]) == ("nonfinite", "nan")
    assert (cell["site"]["step"], cell["suspects"]) == (3, ["row 2"])
    assert codes(cell["repairs"]) == ["loss_filtered"]
    said = "NaN filter (logging_nan_inf_filter) keeps nan, handed to backward, out of its log"
    assert said in done.out
    assert said in (tmp_path / "out" / "report.md").read_text().replace("\\_", "_")


def test_the_trainers_filter_watched(tmp_path: Path) -> None:
    """The raw value beside the one that was logged."""
    (tmp_path / "train.py").write_text(HEAD + TRAINER)
    done = nanbisect("watch", "--stop", "--", PYTHON, "train.py", "--bad", "--logging", "1", cwd=tmp_path)
    assert "non-finite: NaN in the loss of step 3" in done.err
    assert "the Trainer logged loss 0 where nan was handed to backward" in done.err
    assert "'loss': '0'" in done.out or "'loss': 0.0" in done.out, done.out
