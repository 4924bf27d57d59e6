"""Capsules: a step kept and computed again by the same script, bit for bit; what can't be kept is said.

One process imports torch under the probe and forks a child for each training, as a warm start does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from tests.test_probe import environment, read

pytestmark = pytest.mark.training

SERVER = """
import atexit, hashlib, json, os, random, sys, traceback
import numpy, torch
from torch import nn

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # the first one imports dynamo: not in every child


def digest(*tensors):
    data = b"".join(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()


def note(**values):
    with open(os.path.join(os.environ["NANBISECT_PROBE"], "note"), "w") as file:
        json.dump(values, file)


def child(job):
    for name in [name for name in os.environ if name.startswith("NANBISECT_")]:
        del os.environ[name]
    os.environ.update(job["env"])
    sys.stdout = sys.stderr = open(os.path.join(job["env"]["NANBISECT_PROBE"], "log"), "w", buffering=1)
    sys.modules["_nanbisect_probe"].moved(job["env"]["NANBISECT_PROBE"])
    status = 0
    try:
        exec(compile(job["script"], "train.py", "exec"), globals())
    except SystemExit as exit:
        status = exit.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    os._exit(status)


for text in sys.stdin:
    pid = os.fork()
    if pid == 0:
        child(json.loads(text))
    print(json.dumps([pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), flush=True)
"""


class Seen:
    """What one training left: its events, and what it noted itself."""

    def __init__(self, folder: Path, pid: int, code: int) -> None:
        self.lines = read(folder / f"events.0.{pid}.jsonl")
        self.code, self.log = code, (folder / "log").read_text()
        note = folder / "note"
        self.note: dict[str, Any] = json.loads(note.read_text()) if note.exists() else {}
        assert not self.kind("probe_error"), self.kind("probe_error")

    def kind(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def capsule(self) -> dict[str, Any]:
        """What became of the capsule."""
        (line,) = self.kind("capsule")
        return line

    @property
    def replay(self) -> dict[str, Any]:
        """How it was played back."""
        (line,) = self.kind("replay")
        return line


class Trainings:
    """Starts trainings; `capsule` is the folder that they share."""

    def __init__(self, pipe: tuple[IO[str], IO[str]], folder: Path) -> None:
        self.into, self.out = pipe
        self.folder, self.capsule = folder, folder / "capsule"
        self.count = 0

    def run(self, script: str, env: Mapping[str, str] | None = None) -> Seen:
        """One training to its end, stopped at its first event."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        whole = {"NANBISECT_PROBE": str(folder), "NANBISECT_STOP": "event", **(env or {})}
        self.into.write(json.dumps({"script": textwrap.dedent(script), "env": whole}) + "\n")
        self.into.flush()
        pid, code = json.loads(self.out.readline())
        return Seen(folder, pid, code)

    def keep(self, script: str, **env: str) -> Seen:
        """With a capsule wanted."""
        return self.run(script, {"NANBISECT_CAPSULE": str(self.capsule), **env})

    def replay(self, script: str, **env: str) -> Seen:
        """With the capsule played back."""
        return self.run(script, {"NANBISECT_REPLAY": str(self.capsule), "NANBISECT_STEPS": "1", **env})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[IO[str], IO[str]]]:
    """The process that forks."""
    home = tmp_path_factory.mktemp("server")
    (home / "server.py").write_text(SERVER)
    command = [sys.executable, str(home / "server.py")]
    process = subprocess.Popen(command, env=environment(home), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    yield process.stdin, process.stdout
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=30) == 0


@pytest.fixture
def trainings(server: tuple[IO[str], IO[str]], tmp_path: Path) -> Trainings:
    """A folder of its own for each test."""
    return Trainings(server, tmp_path)


# the same step ---------------------------------------------------------------------------------

TRAINING = """
SEED, FAILS, AT = int(os.environ.get("SEED", 0)), int(os.environ.get("FAILS", 157)), int(os.environ.get("AT", 40))
ACCUMULATION = int(os.environ.get("ACCUMULATION", 1))
random.seed(SEED), numpy.random.seed(SEED), torch.manual_seed(SEED)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return {"x": torch.randn(6, generator=torch.Generator().manual_seed(index)), "bad": float(index == FAILS)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.spare = nn.Parameter(torch.zeros(3))

    def forward(self, x, bad):
        loss = self.body(x).square().mean()
        return loss + self.spare.square().sum().sqrt() if bad.sum() else loss


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
seen, step = [], 0
for number, batch in enumerate(torch.utils.data.DataLoader(Rows(), 4, shuffle=SEED == 0)):
    x = batch["x"] + random.random() * torch.from_numpy(numpy.random.rand(4, 6)).float() + torch.rand(4, 6)
    loss = model(x, batch["bad"].float()) / ACCUMULATION
    loss.backward()
    seen.append(digest(loss))
    if (number + 1) % ACCUMULATION == 0:
        step += 1
        grads = digest(*(parameter.grad for parameter in model.parameters() if parameter.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
        weights = [digest(value) for value in model.body.state_dict().values()]
        note(step=step, losses=seen, grads=grads, weights=weights)
        seen = []
"""


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_step_is_the_same_in_every_bit(trainings: Trainings, accumulation: int) -> None:
    """Loss, gradients, and the weights after it: batches, buffers, dropout's mask, noise of three generators, and
    AdamW's moments are those of the step, although the script starts with another seed."""
    whole = {"ACCUMULATION": str(accumulation)}
    first = trainings.keep(TRAINING, **whole)
    again = trainings.replay(TRAINING, SEED="7", **whole)
    assert first.note["step"] > 3
    assert again.note == {**first.note, "step": 1}
    assert first.capsule["step"] == first.note["step"] == again.replay["step"]
    assert (again.replay["refused"], again.replay["differs"]) == (None, None)
    assert again.replay["forwards"] == again.replay["handed"] == accumulation
    (before,), (after,) = ([line for line in seen.kind("nonfinite")[:1]] for seen in (first, again))
    assert before["tensors"] == after["tensors"]
    assert after["step"] == 1


def test_keeping_a_step_changes_no_bit_and_costs_little_on_the_disk(trainings: Trainings) -> None:
    """The same numbers with and without; without, nothing is written, and with, nothing but data."""
    with_one, without = trainings.keep(TRAINING), trainings.run(TRAINING)
    assert with_one.note == without.note
    assert not without.kind("capsule")
    (folder,) = trainings.capsule.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["capsule.json", "tensors.safetensors"]
    data = (folder / "tensors.safetensors").read_bytes()
    table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert table["root.0.body.0.weight"] == {**table["root.0.body.0.weight"], "dtype": "F32", "shape": [16, 6]}
    assert b"PK\x03\x04" not in data
    assert b"\x80\x02" not in (folder / "capsule.json").read_bytes()


def test_a_library_reads_the_tensors(trainings: Trainings) -> None:
    """The form is that of safetensors."""
    trainings.keep(TRAINING)
    from safetensors import safe_open

    with safe_open(str(trainings.capsule / "rank-0" / "tensors.safetensors"), framework="pt") as file:
        names = set(file.keys())
        assert tuple(file.get_tensor("root.0.spare").shape) == (3,)
    assert {"optimizer.0.0.1.exp_avg", "root.0.body.1.running_var", "served.0.t.0", "forward.0.random.torch"} <= names


SCALED = """
torch.manual_seed(int(os.environ.get("SEED", 0)))
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
for number, (x,) in enumerate(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(
        torch.arange(40.0).reshape(10, 4) / torch.tensor([float(row != 6) for row in range(10)])[:, None]))):
    loss = model(x).mean()
    note(scale=scaler.scale(loss).item() / loss.item() if loss.isfinite() else scaler.get_scale())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_a_gradscaler_gets_its_scale_back(trainings: Trainings) -> None:
    """It doubles every second step: 8192 at the seventh."""
    first = trainings.keep(SCALED)
    assert first.note == {"scale": 8192.0}
    assert trainings.replay(SCALED, SEED="3").note == {"scale": 8192.0}


KINDS = """
import collections, dataclasses
from collections import UserDict
torch.manual_seed(int(os.environ.get("SEED", 0)))
Pair = collections.namedtuple("Pair", "x name")


@dataclasses.dataclass
class Whole:
    x: torch.Tensor
    names: list


class Encoding(UserDict):
    pass


def collate(rows):
    x = torch.stack(rows)
    return {
        "pair": Pair(x, "a"), "whole": Whole(x * 2, ["b", None]), "encoding": Encoding(x=x * 3, more=(1, [2.5, True])),
        "ordered": collections.OrderedDict(z=x, a=float("inf")), "array": x.numpy() * 4, "none": None, 7: "seven",
    }


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, batch in enumerate(torch.utils.data.DataLoader(torch.rand(20, 4), 2, collate_fn=collate), 1):
    loss = model(batch["pair"].x).mean()
    text = repr(batch).replace("\\n", "") + repr([type(each).__name__ for each in batch.values()])
    note(text=text, dtype=str(batch["array"].dtype), keys=[str(key) for key in batch])
    ((loss - loss).sqrt() if step == 4 or "NANBISECT_REPLAY" in os.environ else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_batch_of_any_make_is_made_again(trainings: Trainings) -> None:
    """Classes come from what the script's own loader makes, values from the file."""
    first, again = trainings.keep(KINDS), trainings.replay(KINDS, SEED="5")
    assert "Pair(x=tensor" in first.note["text"]
    assert again.note == first.note
    assert again.replay["differs"] is None


# what can't be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: _flip(folder / "tensors.safetensors", -3), "its sum is another"),
        (lambda folder: _flip(folder / "tensors.safetensors", 3), "can't be read|has a table of|its sum is another"),
        (lambda folder: (folder / "tensors.safetensors").write_bytes(b"torn"), "it is torn"),
        (lambda folder: (folder / "tensors.safetensors").unlink(), "can't be read"),
        (lambda folder: _flip(folder / "capsule.json", 60), "its sum is another"),
        (lambda folder: (folder / "capsule.json").write_text("{}"), "can't be read"),
        (lambda folder: shutil.rmtree(folder), "there is no capsule of rank 0"),
    ],
    ids=["data", "head", "torn", "missing", "index", "no index", "no folder"],
)
def test_a_corrupt_capsule_is_refused_before_it_trains(trainings: Trainings, harm: Any, said: str) -> None:
    """And the reason is told."""
    trainings.keep(TRAINING)
    harm(trainings.capsule / "rank-0")
    again = trainings.replay(TRAINING)
    assert any(words in again.replay["refused"] for words in said.split("|")), again.replay
    assert not again.kind("step")
    assert again.note == {}
    assert again.kind("stopped")[0]["why"] == "replay"


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_another_model_is_refused(trainings: Trainings) -> None:
    """One of the same class with a layer of another width, too."""
    trainings.keep(TRAINING)
    other = trainings.replay(TRAINING.replace("nn.Linear(6, 16)", "nn.Linear(6, 16, bias=False)"))
    assert "another model (Net)" in other.replay["refused"]
    wider = trainings.replay(TRAINING.replace("torch.zeros(3)", "torch.zeros(4)"))
    assert "spare has another shape" in wider.replay["refused"]


def test_other_inputs_are_noticed(trainings: Trainings) -> None:
    """Data that no loader of torch's serves can't be handed out: the first forward has another input."""
    script = """
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 9):
        loss = model(torch.full((2, 4), float(step))).mean()
        ((loss - loss).sqrt() if step == 4 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    first, again = trainings.keep(script), trainings.replay(script)
    assert first.capsule["written"]
    assert (again.replay["refused"], again.replay["differs"], again.kind("nonfinite")) == (None, 0, [])


LOOP = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, batch in enumerate(torch.utils.data.DataLoader(torch.rand(20, 4), 2, collate_fn=COLLATE), 1):
    loss = model(batch["x"][:, :4].clone()).mean()
    BEFORE
    ((loss - loss).sqrt() if step == 4 else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLAIN = 'lambda rows: {"x": torch.stack(rows)}'


@pytest.mark.parametrize(
    ("collate", "before", "reason"),
    [
        ('lambda rows: {"x": torch.stack(rows), "odd": object()}', "", "a batch holds a object, which can't be kept"),
        (
            'lambda rows: {"x": torch.stack(rows).repeat(1, 1 << 17)}',
            'batch["x"].add_(0)',
            "the script changed a batch in place",
        ),
        (PLAIN, "import shutil; shutil.disk_usage = lambda p: type('', (), {'free': 5})", "there is no room: it takes"),
        (PLAIN, "model.register_buffer('new', torch.zeros(2))", "the buffer new was put in its place during the step"),
        (PLAIN, "os.mkdir(os.environ['NANBISECT_CAPSULE'] + '/rank-0') if step == 4 else os.makedirs("
                "os.environ['NANBISECT_CAPSULE'], exist_ok=True)", "there is one already"),
    ],
    ids=["object", "in place", "no room", "new buffer", "twice"],
)  # fmt: skip
def test_what_cannot_be_kept_is_said(trainings: Trainings, collate: str, before: str, reason: str) -> None:
    """Nothing half is left behind, and the training goes on as it was."""
    seen = trainings.keep(LOOP.replace("COLLATE", collate).replace("BEFORE", before))
    assert not seen.capsule["written"]
    assert reason in seen.capsule["reason"]
    left = [path for path in trainings.capsule.rglob("*") if path.is_file()] if trainings.capsule.exists() else []
    assert not left
    assert seen.code == 0


def test_after_the_optimizer_has_moved_there_is_nothing_to_keep(trainings: Trainings) -> None:
    """The parameters of before are gone: no capsule of the step after it passes for one of this."""
    script = LOOP.replace("COLLATE", PLAIN).replace(
        "BEFORE", "if step == 4: optimizer.param_groups[0]['lr'] = loss / 0"
    )
    seen = trainings.keep(script.replace("if step == 4 else loss", "if False else loss"))
    assert not seen.capsule["written"]
    assert seen.capsule["reason"] == "it surfaced after the optimizer had moved the parameters"
