"""The probe in real training processes: what it sees, what it must not say, and that it changes no bit.

Importing torch takes seconds, so one process imports it and forks a child for each scenario (the probe
starts afresh in a fork, which is itself under test). Each test carries its scenario as text.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

PROBE = Path(__file__).parents[1] / "nanbisect" / "probe"
Test = Callable[..., None]
SCRIPTS: dict[str, str] = {}

pytestmark = pytest.mark.training


def schema() -> Mapping[str, Mapping[str, str]]:
    """The table of events, read as data: the probe is never imported here."""
    spec = importlib.util.spec_from_file_location("probe_schema", PROBE / "schema.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table: Mapping[str, Mapping[str, str]] = module.EVENTS
    return table


EVENTS = schema()
TENSOR = {"name", "value", "micro_batch", "uses", "nan", "posinf", "neginf", "numel"}


def scenario(script: str) -> Callable[[Test], Test]:
    """The training that the test looks at."""

    def register(test: Test) -> Test:
        SCRIPTS[test.__name__] = textwrap.dedent(script)
        return test

    return register


PRELUDE = '''
import atexit, gc, json, math, os, sys, traceback, weakref
import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
NAN, INF = math.nan, math.inf


class Burn(torch.autograd.Function):
    """The identity; in backward one element, or all, become `value`."""

    @staticmethod
    def forward(ctx, x, value, everywhere=True):
        ctx.value, ctx.everywhere = value, everywhere
        ctx.variable = x.detach()  # a name that AccumulateGrad uses too
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        (grad if ctx.everywhere else grad.view(-1)[:1]).fill_(ctx.value)
        return grad, None, None


class Half(torch.autograd.Function):
    """The identity; gradients pass through fp16, so large ones overflow."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.half().float()


class Net(nn.Module):
    """Three layers; what is in `burn` happens to the gradient between the second and the third."""

    def __init__(self, **kwargs):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, **kwargs) for _ in range(3))
        self.burn = lambda x: x

    def forward(self, x):
        return self.third(self.burn(self.second(self.first(x))))


def nan(x):
    return Burn.apply(x, NAN)


def net(burn=None, **kwargs):
    torch.manual_seed(0)
    model = Net(**kwargs)
    model.burn = burn or model.burn
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def x(dtype=torch.float32):
    return torch.linspace(-1, 1, 8).reshape(2, 4).to(dtype)


def probe():
    return sys.modules["_nanbisect_probe"]


def step(model, optimizer, clip=None):
    model(x()).square().mean().backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def overflowing(optimizer_of, power, steps):
    """Gradients that overflow fp16 at a scale of 2 ** 16 and above."""
    model, _ = net(Half.apply)
    optimizer = optimizer_of(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** power)
    for _ in range(steps):
        scaler.scale(model(x()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
'''

RUNNER = (
    PRELUDE
    + """
HERE, WANTED = sys.argv[1], sys.argv[2:]
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # the first one imports dynamo: not in every child


def note(**values):
    with open(os.path.join(HERE, NAME + ".note"), "w") as file:
        json.dump(values, file)


def leave(code):  # end as Python does, without the second that taking torch apart would need
    status = 0
    try:
        exec(code, globals())
    except SystemExit as exit:
        status = exit.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    os._exit(status)


pids = {}
for NAME in WANTED:
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.path.join(HERE, NAME + ".err"), "w", buffering=1)
        leave(compile(open(os.path.join(HERE, NAME + ".txt")).read(), NAME, "exec"))
    pids[NAME] = (pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
with open(os.path.join(HERE, "pids.json"), "w") as file:
    json.dump(pids, file)
"""
)


def environment(folder: Path | None, *before: Path) -> dict[str, str]:
    """This environment with the probe writing to a folder (or absent), and other folders on PYTHONPATH."""
    dropped = ("PROBE", "STOP", "STEPS", "BACKWARDS", "TRACE")
    unwanted = {*(f"NANBISECT_{name}" for name in dropped), "RANK", "PYTHONPATH"}
    kept = {key: value for key, value in os.environ.items() if key not in unwanted}
    paths = [str(PROBE / "site")] if folder is not None else []
    found = {**kept, "PYTHONPATH": os.pathsep.join(paths + [str(path) for path in before]), "OMP_NUM_THREADS": "1"}
    return found if folder is None else {**found, "NANBISECT_PROBE": str(folder)}


def run(script: Path, env: Mapping[str, str], *arguments: str) -> str:
    """The standard output of a script that must end well."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Seen:
    """The events of one scenario, checked against the table."""

    def __init__(self, folder: Path, name: str, pid: int, code: int) -> None:
        self.folder, self.code = folder, code
        note = folder / f"{name}.note"
        self.note: dict[str, Any] = json.loads(note.read_text()) if note.exists() else {}
        self.err = (folder / f"{name}.err").read_text()
        self.lines = self.of_process(pid)

    def of_process(self, pid: int) -> list[dict[str, Any]]:
        """All events of one process; each has exactly the fields of the table."""
        return read(self.folder / f"events.0.{pid}.jsonl")

    def kind(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def nonfinite(self) -> dict[str, Any]:
        """The one non-finite event."""
        (event,) = self.kind("nonfinite")
        return event

    @property
    def names(self) -> list[str]:
        """What the event lists, in order."""
        return [tensor["name"] for tensor in self.nonfinite["tensors"]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The step lines."""
        return self.kind("step")

    @property
    def ended(self) -> list[str]:
        """How each step ended."""
        return [line["ended"] for line in self.steps]

    @property
    def repairs(self) -> list[str]:
        """Codes of repairs, in order."""
        return [line["code"] for line in self.kind("repair")]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an event file, each checked against the table."""
    lines = [json.loads(text, parse_constant=refuse) for text in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        assert set(line) == {"kind", "n", "time", *EVENTS[line["kind"]]}
        for tensor in line["tensors"] if line["kind"] == "nonfinite" else line.get("bad", []):
            assert set(tensor) == TENSOR
    return lines


def refuse(name: str) -> None:
    """NaN is no JSON."""
    raise AssertionError(f"{name} in JSON")


@pytest.fixture(scope="module")
def all_seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Run every scenario that was collected, in one go."""
    folder = tmp_path_factory.mktemp("probe")
    here = request.node.nodeid
    names = [item.name for item in request.session.items if item.name in SCRIPTS and item.nodeid.startswith(here)]
    for name in names:
        (folder / f"{name}.txt").write_text(SCRIPTS[name])
    script = folder / "runner.py"
    script.write_text(RUNNER)
    run(script, environment(folder), str(folder), *names)
    pids = json.loads((folder / "pids.json").read_text())
    return {name: Seen(folder, name, *pids[name]) for name in names}


@pytest.fixture
def seen(request: pytest.FixtureRequest, all_seen: dict[str, Seen]) -> Seen:
    """The events of this test's scenario: it was awake, and none of its own work failed."""
    found = all_seen[request.node.name]
    assert not found.kind("probe_error"), found.kind("probe_error")
    return found


# healthy training ------------------------------------------------------------------------------


@scenario("""
    model, optimizer = net()
    for _ in range(2):
        step(model, optimizer, clip=1.0)
    note(found=probe().found())
""")
def test_healthy_training_leaves_an_account_and_no_event(seen: Seen) -> None:
    kinds = [line["kind"] for line in seen.lines]
    assert kinds == ["awake", "root", "self_check", "batch", "step", "batch", "step", "exit"]
    assert seen.kind("self_check")[0]["seen"] is True
    root, (first, second) = seen.kind("root")[0], seen.steps
    assert (root["module"], root["parameters"], root["elements"], root["dtypes"]) == ("Net", 6, 60, {"float32": 6})
    assert (root["dropout"], root["tied"]) == (False, [])
    assert (first["step"], first["taken"], first["ended"], first["backwards"]) == (1, True, "step", 1)
    assert (first["gradients"], first["bad"], first["nested"], first["recomputed"]) == (6, [], 0, 0)
    assert first["clip"] == {"call": "clip_grad_norm_", "max_norm": 1.0, "raised": False}
    norms = first["gradient_norms"]
    assert math.isclose(first["norm"], math.hypot(*norms.values()), rel_tol=1e-5) and len(norms) == 6
    assert second["step"] == 2 and second["gradient_norms"] is None
    assert second["losses"][0]["handed"] < first["losses"][0]["handed"]
    assert 0 < first["probe_seconds"] < first["seconds"] and seen.note == {"found": False}


@scenario("""
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.attention = nn.Dropout(0.1), nn.Linear(4, 4)
            self.lazy = nn.LazyLinear(4)
        def forward(self, x):
            x = self.drop(self.attention(x))
            return self.lazy((x @ x.T).softmax(-1) @ x)
    model = Lookup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        (model(x()).double().sum() * 1e300).mul(1e-300).backward()
        optimizer.step()
    (model(x()).double().sum() * 0 + 1e300).backward()  # a large healthy float64
    optimizer.step()
""")
def test_kernels_dropout_lazy_parameters_and_large_float64(seen: Seen) -> None:
    assert seen.ended == ["step"] * 3 and not seen.kind("nonfinite")
    assert seen.steps[0]["kernels"] == {"SoftmaxBackward0": 1} and seen.kind("root")[0]["dropout"] is True
    assert seen.steps[2]["losses"][0]["handed"] == 1e300


# where it surfaces -----------------------------------------------------------------------------


@scenario("""
    model, optimizer = net(nan)
    step(model, optimizer, clip=1.0)
    note(found=probe().found())
""")
def test_nan_born_in_a_middle_layer_is_named_before_clipping_smears_it(seen: Seen) -> None:
    event, (line,) = seen.kind("nonfinite")[0], seen.steps
    assert (event["step"], event["micro_batch"], event["phase"], event["value"]) == (1, 0, "backward", "nan")
    assert [tensor["name"] for tensor in event["tensors"]] == [
        "second.bias", "second.weight", "first.bias", "first.weight",
    ]  # fmt: skip
    assert event["tensors"][1] == {
        "name": "second.weight", "value": "nan", "micro_batch": 0, "uses": [],
        "nan": 16, "posinf": 0, "neginf": 0, "numel": 16,
    }  # fmt: skip
    assert (event["bad"], event["of"]) == (4, 6)
    census = {"first": "first.weight", "bad": 16, "numel": 16, "parameters_bad": 6, "parameters": 6}
    assert line["norm"] == "nan" and line["after_clip"] == census  # the third layer was healthy
    assert seen.note == {"found": True}
    assert [(event["phase"], event["step"]) for event in seen.kind("nonfinite")[1:]] == [("optimizer", 1)]


@scenario("""
    model, optimizer = net()
    loss = model(x()).square().mean()
    model.third.bias.register_hook(lambda grad: torch.cat([torch.full_like(grad[:1], INF), grad[1:]]))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    note(zero=sum(int((p.grad == 0).sum()) for p in model.parameters()),
         nan=sum(int(p.grad.isnan().sum()) for p in model.parameters()))
    optimizer.step()
""")
def test_inf_norm_zeroes_everything_but_one_element(seen: Seen) -> None:
    event = seen.kind("nonfinite")[0]
    assert (event["value"], event["bad"]) == ("+inf", 1)
    assert event["tensors"][0] == {
        "name": "third.bias", "value": "+inf", "micro_batch": 0, "uses": [],
        "nan": 0, "posinf": 1, "neginf": 0, "numel": 4,
    }  # fmt: skip
    assert seen.repairs == ["zero_after_inf"] and seen.note == {"zero": 59, "nan": 1}
    assert seen.steps[0]["norm"] == "+inf"
    assert seen.steps[0]["after_clip"]["first"] == "third.bias" and seen.steps[0]["after_clip"]["bad"] == 1


@scenario("""
    model, optimizer = net()
    step(model, optimizer)
    (model(x()).mean() * NAN).backward()
    optimizer.step()
""")
def test_nan_loss_stands_before_its_gradients(seen: Seen) -> None:
    event = seen.kind("nonfinite")[0]
    assert (event["step"], event["phase"], event["value"], event["bad"]) == (2, "loss", "nan", 6)
    assert seen.steps[1]["losses"] == [{"micro_batch": 0, "handed": "nan", "unscaled": None}]


TIED = """
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
        def forward(self, ids, where):
            h = self.embed(ids)
            h = nan(h) if where == "lookup" else h
            out = self.head(h)
            return nan(out) if where == "head" else out
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.arange(4), "WHERE").sum().backward()
    optimizer.step()
"""


@scenario(TIED.replace("WHERE", "lookup"))
def test_nan_through_the_lookup_of_a_tied_weight(seen: Seen) -> None:
    (tensor,) = seen.kind("nonfinite")[0]["tensors"]
    assert tensor["name"] == "embed.weight" and tensor["nan"] == 16
    assert tensor["uses"] == ["lookup (EmbeddingBackward0)"]
    assert seen.kind("root")[0]["tied"] == [["embed.weight", "head.weight"]]
    assert seen.steps[0]["gradients"] == 1


@scenario(TIED.replace("WHERE", "head"))
def test_nan_through_the_head_of_a_tied_weight(seen: Seen) -> None:
    (tensor,) = seen.kind("nonfinite")[0]["tensors"]
    assert tensor["uses"] == ["head (MmBackward0)", "lookup (EmbeddingBackward0)"]  # it goes on through the lookup


@scenario("""
    model, optimizer = net()
    for micro in range(3):
        model.burn = nan if micro else lambda x: x
        (model(x()).square().mean() / 3).backward()
    optimizer.step()
""")
def test_gradient_accumulation_names_the_micro_batch_and_counts_each_tensor_once(seen: Seen) -> None:
    event, (line,) = seen.kind("nonfinite")[0], seen.steps
    assert (event["micro_batch"], event["bad"], event["of"]) == (1, 4, 6)
    assert (line["backwards"], line["gradients"], len(line["bad"])) == (3, 18, 4)
    assert [loss["micro_batch"] for loss in line["losses"]] == [0, 1, 2]


@scenario("""
    model, optimizer = net()
    for micro in range(2):
        model.burn = nan if micro else lambda x: x
        model(x()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""")
def test_what_arrives_after_a_clip_is_judged_too(seen: Seen) -> None:
    event = seen.kind("nonfinite")[0]
    assert (event["phase"], event["micro_batch"], event["tensors"][0]["name"]) == ("backward", 1, "second.bias")


CHECKPOINT = """
    from torch.utils.checkpoint import checkpoint
    model, optimizer = net()
    block = nn.Sequential(model.first, model.second)
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = block, nn.Linear(4, 4)
        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=REENTRANT))
    whole = Whole()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for micro in range(2):
        whole(x().requires_grad_()).square().mean().backward()
    optimizer.step()
"""


@scenario(CHECKPOINT.replace("REENTRANT", "False"))
def test_non_reentrant_checkpointing_recomputes_and_does_not_nest(seen: Seen) -> None:
    (line,) = seen.steps
    assert (line["nested"], line["backwards"]) == (0, 2)
    assert line["recomputed"] >= 4 and line["gradients"] >= 12  # the input is a leaf with a gradient, too


@scenario(CHECKPOINT.replace("REENTRANT", "True"))
def test_reentrant_checkpointing_nests(seen: Seen) -> None:
    (line,) = seen.steps
    assert (line["nested"], line["backwards"], line["recomputed"]) == (2, 2, 6)
    assert line["gradients"] >= 12 and len(line["losses"]) == 2 and seen.ended == ["step"]


@scenario("""
    model, optimizer = net(nan)
    model(x()).square().mean().backward()
    sys.exit(3)
""")
def test_exit_in_the_middle_of_a_step_leaves_the_event(seen: Seen) -> None:
    assert seen.code == 3 and seen.ended == ["exit"]
    assert (seen.nonfinite["phase"], seen.names[0]) == ("backward", "second.bias")


@scenario("""
    model, optimizer = net(nan)
    model(x()).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
""")
def test_clipping_that_raises_still_raises_and_is_recorded(seen: Seen) -> None:
    assert seen.code == 1 and "non-finite" in seen.err
    assert seen.names[0] == "second.bias" and seen.steps[0]["clip"]["raised"] is True and seen.ended == ["exit"]


# GradScaler ------------------------------------------------------------------------------------


@scenario("overflowing(lambda p: torch.optim.SGD(p, lr=1e-3), power=17, steps=4)")
def test_an_overflow_that_the_scaler_absorbs_is_no_event(seen: Seen) -> None:
    assert not seen.kind("nonfinite") and seen.repairs == ["scaler_skip", "scaler_skip"]
    assert seen.ended == ["scaler_skip", "scaler_skip", "step", "step"]
    assert [line["taken"] for line in seen.steps] == [False, False, True, True]
    assert [line["scale"] for line in seen.steps] == [2.0**17, 2.0**16, 2.0**15, 2.0**15]
    loss = seen.steps[0]["losses"][0]
    assert loss["handed"] == loss["unscaled"] * 2.0**17 and len(seen.steps[0]["bad"]) == 4


@scenario("overflowing(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), power=17, steps=4)")
def test_a_fused_optimizer_decides_for_the_scaler(seen: Seen) -> None:
    assert not seen.kind("nonfinite") and seen.repairs == ["scaler_skip", "scaler_skip"]
    assert seen.ended == ["scaler_skip", "scaler_skip", "step", "step"]
    assert [line["scale"] for line in seen.steps] == [2.0**17, 2.0**16, 2.0**15, 2.0**15]


@scenario("""
    model, optimizer = net(lambda x: Burn.apply(x, INF, False))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(4):
        scaler.scale(model(x()).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""")
def test_an_overflow_that_lasts_down_to_scale_1_is_an_event(seen: Seen) -> None:
    event = seen.kind("nonfinite")[0]
    assert (event["step"], event["phase"], event["scale"]) == (3, "backward", 1.0)
    assert event["tensors"][0]["name"] == "second.bias" and event["bad"] == 4
    assert seen.ended == ["scaler_skip"] * 4 and [line["scale"] for line in seen.steps] == [4.0, 2.0, 1.0, 0.5]


@scenario("""
    model, optimizer = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 127)
    for factor in (64.0, 64.0, NAN):  # the scaled loss overflows float32, the loss itself is 64 or NaN
        scaler.scale(model(x()).sum() * 0 + factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""")
def test_the_loss_is_judged_before_scaling(seen: Seen) -> None:
    assert [line["losses"][0]["handed"] for line in seen.steps] == ["+inf", "+inf", "nan"]
    assert (seen.nonfinite["step"], seen.nonfinite["phase"]) == (3, "loss")


TWO = """
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.burn = Half.apply
        def forward(self, x):
            return self.a(x).sum() + self.burn(self.b(x)).sum()
    torch.manual_seed(0)
    model = Two()
    of_a, of_b = torch.optim.SGD(model.a.parameters(), lr=1e-3), torch.optim.SGD(model.b.parameters(), lr=1e-3)
"""


@scenario(
    TWO
    + """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
    for _ in range(2):
        scaler.scale(model(x())).backward()
        scaler.step(of_a)
        scaler.step(of_b)
        scaler.update()
        model.zero_grad()
"""
)
def test_an_overflow_of_the_second_optimizer_is_not_laid_on_the_first(seen: Seen) -> None:
    assert not seen.kind("nonfinite")
    assert seen.repairs == ["scaler_skip"] and seen.kind("repair")[0]["tensors"] == ["b.bias", "b.weight"]
    assert [(line["step"], line["ended"]) for line in seen.steps] == [(1, "step"), (2, "step")]


@scenario(
    TWO
    + """
    model.burn = nan
    model(x()).backward()
    of_a.step()
    for p in model.b.parameters():
        p.grad = None
    of_b.step()
"""
)
def test_the_first_optimizer_does_not_lose_the_evidence_of_the_second(seen: Seen) -> None:
    assert seen.nonfinite["step"] == 1 and seen.names == ["b.bias", "b.weight"]
    (repair,) = seen.kind("repair")
    assert (repair["step"], repair["code"], repair["tensors"]) == (1, "gradients_set_to_none", ["b.bias", "b.weight"])
    assert seen.ended == ["step"]


@scenario(
    TWO
    + """
    of_b = torch.optim.SGD(model.b.parameters(), lr=INF)
    model(x()).backward()
    of_a.step()
    of_b.step()
"""
)
def test_what_the_second_optimizer_breaks_is_seen_in_the_same_step(seen: Seen) -> None:
    assert (seen.nonfinite["step"], seen.nonfinite["phase"]) == (1, "optimizer")
    assert seen.names == ["b.weight", "b.bias"]


# load, forward, optimizer ----------------------------------------------------------------------


@scenario("""
    torch.manual_seed(0)
    model = Net(dtype=torch.float16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
    model(torch.zeros(2, 4, dtype=torch.float16)).float().sum().backward()
    optimizer.step()
""")
def test_fp16_adam_divides_zero_by_zero(seen: Seen) -> None:
    assert (seen.nonfinite["phase"], seen.nonfinite["value"]) == ("optimizer", "nan")
    assert "first.weight" in seen.names and seen.steps[0]["bad"] == [] and seen.ended == ["step"]


@scenario("""
    model, optimizer = net()
    with torch.no_grad():
        model.second.weight[0, 0] = NAN
    step(model, optimizer)
""")
def test_a_parameter_that_is_nan_after_loading(seen: Seen) -> None:
    event = seen.kind("nonfinite")[0]
    assert (event["phase"], event["step"], event["bad"], event["of"]) == ("load", 1, 1, 6)
    assert event["tensors"][0]["name"] == "second.weight" and event["tensors"][0]["nan"] == 1


@scenario("""
    model, optimizer = net()
    model.register_buffer("scale", torch.tensor([1.0, NAN]))
    step(model, optimizer)
""")
def test_a_buffer_that_is_nan_after_loading(seen: Seen) -> None:
    assert seen.kind("nonfinite")[0]["phase"] == "load" and seen.kind("nonfinite")[0]["tensors"][0]["name"] == "scale"


@scenario("""
    model, optimizer = net()
    model.register_buffer("unused", torch.tensor([1.0, NAN]), persistent=False)
    model.register_buffer("odd", torch.tensor([NAN, INF]), persistent=False)
    step(model, optimizer)
    model.odd.fill_(INF)
    step(model, optimizer)
""")
def test_a_nan_buffer_that_no_checkpoint_holds_is_a_note(seen: Seen) -> None:
    assert not seen.kind("nonfinite") and seen.ended == ["step"] * 2
    assert seen.repairs == ["nan_buffer"] * 2 and seen.kind("repair")[0]["tensors"] == ["unused"]


@scenario("""
    model, optimizer = net()
    model.register_buffer("scale", torch.tensor([NAN]), persistent=False)
    model.burn = lambda x: x * model.scale
    step(model, optimizer)
""")
def test_where_it_is_used_the_loss_shows_it(seen: Seen) -> None:
    assert (seen.kind("nonfinite")[0]["phase"], seen.repairs[0]) == ("loss", "nan_buffer")


@scenario("""
    model, optimizer = net()
    step(model, optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        model(x()).float().square().mean().backward()
    optimizer.step()
    model.burn = Half.apply
    step(model, optimizer)
    model.burn = lambda x: torch.utils.checkpoint.checkpoint(nn.functional.relu, x, use_reentrant=True)
    step(model, optimizer)
""")
def test_casts_in_the_graph_and_nodes_that_may_hide_some(seen: Seen) -> None:
    plain, autocast, own, checkpointed = [line["casts"] for line in seen.steps]
    assert plain == checkpointed == 0 and autocast > 6 and own is None


@scenario("""
    model, optimizer = net()
    model.register_buffer("mask", torch.full((4, 4), -INF).triu(1))
    outer = nn.Sequential(model)
    step(model, optimizer)
    step(outer, optimizer)
    step(model, optimizer)
""")
def test_a_mask_of_inf_is_a_note_and_no_event(seen: Seen) -> None:
    assert not seen.kind("nonfinite") and seen.repairs == ["infinite_buffer"] and seen.ended == ["step"] * 3


@scenario("""
    model, optimizer = net()
    model.register_buffer("running", torch.zeros(4))
    def poison(x):
        model.running.add_(NAN)
        return x
    model.burn = poison
    step(model, optimizer)
""")
def test_a_buffer_poisoned_in_forward(seen: Seen) -> None:
    assert (seen.nonfinite["phase"], seen.names) == ("forward", ["running"]) and seen.ended == ["step"]


# silent repairs --------------------------------------------------------------------------------


@scenario("""
    model, optimizer = net(nan)
    model(x()).square().mean().backward()
    for p in model.parameters():
        p.grad = None if p.grad.isnan().any() else p.grad
    optimizer.step()
""")
def test_gradients_set_to_none(seen: Seen) -> None:
    assert seen.repairs == ["gradients_set_to_none"] and len(seen.kind("repair")[0]["tensors"]) == 4
    assert seen.nonfinite["bad"] == 4 and seen.steps[0]["taken"] is True
    assert seen.nonfinite["tensors"][0]["nan"] is None  # the gradient was gone before anybody counted


@scenario("""
    model, optimizer = net(nan)
    model(x()).square().mean().backward()
    for p in model.parameters():
        p.grad.nan_to_num_()
    optimizer.step()
""")
def test_gradients_repaired_in_place(seen: Seen) -> None:
    assert seen.repairs == ["gradients_repaired"] and seen.nonfinite["phase"] == "backward"


@scenario("""
    model, optimizer = net(nan)
    for _ in range(2):
        norm = (model(x()).square().mean().backward(), nn.utils.clip_grad_norm_(model.parameters(), 1.0))[1]
        if not norm.isfinite():
            optimizer.zero_grad()
            model.burn = lambda x: x
            continue
        optimizer.step()
""")
def test_a_step_dropped_by_the_script(seen: Seen) -> None:
    assert seen.repairs == ["dropped_step"] and seen.ended == ["dropped", "step"]
    assert seen.nonfinite["step"] == 1 and [line["taken"] for line in seen.steps] == [False, True]


# scripts that do it their own way --------------------------------------------------------------


@scenario("""
    model, optimizer = net()
    probe().backward_only()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for number in range(2):
        for micro in range(2):
            model.burn = nan if (number, micro) == (1, 1) else lambda x: x
            model(x()).square().mean().backward()
        probe().end_of_step()
""")
def test_gradients_that_are_freed_as_they_arrive(seen: Seen) -> None:
    assert seen.ended == ["backward_only"] * 2 and not seen.repairs
    assert (seen.nonfinite["step"], seen.nonfinite["micro_batch"], seen.nonfinite["bad"]) == (2, 1, 4)


@scenario("""
    model, optimizer = net()
    def hook(p):
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for number in range(2):
        model.burn = nan if number else lambda x: x
        model(x()).square().mean().backward()
""")
def test_a_hook_that_steps_and_drops_is_no_dropped_step(seen: Seen) -> None:
    assert seen.ended == ["backward_only", "exit"] and not seen.repairs
    assert (seen.nonfinite["step"], seen.names[0]) == (2, "second.bias")


@scenario("""
    model, _ = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for number in range(2):
        model.burn = nan if number else lambda x: x
        model(x()).square().mean().backward()
""")
def test_optimizers_that_step_during_backward_make_one_step(seen: Seen) -> None:
    assert seen.ended == ["step", "step"] and [line["gradients"] for line in seen.steps] == [6, 6]
    event = seen.kind("nonfinite")[0]
    assert (event["step"], event["micro_batch"], event["phase"]) == (2, 0, "backward")
    assert event["tensors"][0]["name"] == "second.bias" and not seen.repairs


@scenario("""
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        def compute(self, x):
            return self.decoder(nan(self.encoder(x)))
    model = Parts()
    model.compute(x()).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
""")
def test_a_model_called_by_method_is_found_by_search(seen: Seen) -> None:
    assert [root["module"] for root in seen.kind("root")] == ["Linear", "Linear", "Parts"]
    assert [tensor["name"] for tensor in seen.kind("nonfinite")[0]["tensors"]] == ["encoder.bias", "encoder.weight"]
    assert len(seen.steps[0]["gradient_norms"]) == 4


@scenario("""
    model, _ = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    calls = []
    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x()).square().mean()
        loss.backward()
        return loss
    for _ in range(2):
        optimizer.step(closure)
    note(calls=len(calls))
""")
def test_closures_run_inside_the_step(seen: Seen) -> None:
    assert seen.ended == ["step", "step"] and not seen.repairs and not seen.kind("nonfinite")
    assert sum(line["backwards"] for line in seen.steps) == seen.note["calls"] > 2


@scenario("""
    model, optimizer = net()
    for number in range(2):
        model.burn = nan if number else lambda x: x
        inputs = x().requires_grad_()
        out = model(inputs).square().mean()
        (grad,) = torch.autograd.grad(out, inputs, create_graph=True)
        (out + grad.square().sum()).backward(create_graph=False)
        optimizer.step()
        optimizer.zero_grad()
""")
def test_a_gradient_penalty_is_one_backward(seen: Seen) -> None:
    assert seen.ended == ["step", "step"] and [line["backwards"] for line in seen.steps] == [1, 1]
    assert seen.steps[0]["bad"] == [] and seen.kind("nonfinite")[0]["step"] == 2


@scenario("""
    model, optimizer = net()
    w = torch.ones(2, requires_grad=True)
    loss = model(x()).square().mean()
    torch.autograd.backward(each for each in [loss, w.sum()])
    note(grad=model.first.weight.grad is not None and w.grad is not None)
    optimizer.step()
""")
def test_a_generator_of_losses_is_read_once(seen: Seen) -> None:
    assert seen.code == 0, seen.err
    assert seen.note == {"grad": True} and len(seen.steps[0]["losses"]) == 2


@scenario("""
    model, optimizer = net()
    torch.autograd.set_detect_anomaly(True)
    step(model, optimizer)
    note(anomaly=torch.is_anomaly_enabled())
""")
def test_the_self_check_works_under_anomaly_mode(seen: Seen) -> None:
    assert seen.kind("self_check")[0]["seen"] is True and seen.note == {"anomaly": True} and seen.ended == ["step"]


@scenario("""
    torch.__future__.set_swap_module_params_on_conversion(True)
    model, optimizer = net()
    step(model, optimizer)
    model.double()
    model(x(torch.float64)).square().mean().backward()
    optimizer.step()
""")
def test_tensors_can_be_swapped(seen: Seen) -> None:
    assert seen.code == 0, seen.err
    assert [line["gradients"] for line in seen.steps] == [6, 6]


@scenario("""
    model, optimizer = net()
    class Broken(nn.Module):
        def parameters(self, recurse=True):
            raise RuntimeError("not for you")
    broken = Broken()
    model.first(x()).sum().backward()  # a root
    (model.second(x()).sum() + model.third(x()).sum()).backward()  # a search
    optimizer.step()
    probe()._observer.journal.folder, probe()._observer.journal.pid = "/nowhere/at/all", None
    step(model, optimizer)
    note(moved=True)
""")
def test_a_journal_that_cannot_be_written_does_not_stop_the_training(seen: Seen) -> None:
    assert seen.code == 0, seen.err
    assert seen.note == {"moved": True} and seen.ended == ["step"]


@scenario("""
    model, optimizer = net()
    step(model, optimizer)
    tied = nn.Linear(4, 4, bias=False)
    hidden = tied(x()).relu()
    loss = tied(hidden).square().mean()
    loss.backward()
    held = [weakref.ref(hidden), weakref.ref(tied.weight.grad)]
    del hidden, loss
    tied.weight.grad = None
    gc.collect()
    note(alive=[ref() is not None for ref in held])
""")
def test_nothing_is_kept_alive(seen: Seen) -> None:
    assert seen.note == {"alive": [False, False]}


@scenario("""
    model, optimizer = net(nan)
    model(x()).square().mean().backward()
    pid = os.fork()
    if pid == 0:
        model, optimizer = net()
        step(model, optimizer)
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(pid, 0)
    note(child=pid)
    optimizer.step()
""")
def test_a_forked_child_has_events_of_its_own(seen: Seen) -> None:
    child = seen.of_process(seen.note["child"])
    assert [line["kind"] for line in child] == ["awake", "root", "self_check", "batch", "step", "exit"]
    assert child[-2]["step"] == 1 and seen.kind("nonfinite")[0]["step"] == 1 and seen.ended == ["step"]


# injection -------------------------------------------------------------------------------------

INJECTED = """
import importlib.util, os, sys
assert importlib.util.find_spec("torch") is not None
import sitecustomize, torch
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
print(sitecustomize.MARK, sys.modules["sitecustomize"].__file__)
"""


def test_injection_chains_sitecustomize_and_outlasts_find_spec(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("MARK = 'theirs'\n")
    script = tmp_path / "script.py"
    script.write_text(INJECTED)
    out = run(script, environment(tmp_path, other), "argument")
    assert out.split() == ["theirs", str(other / "sitecustomize.py")]
    (armed,) = [json.loads(line) for line in (tmp_path / "armed.jsonl").read_text().splitlines()]
    assert armed["argv"] == [str(script), "argument"]
    (path,) = tmp_path.glob("events.*.jsonl")
    assert path.name == f"events.0.{armed['pid']}.jsonl"
    lines = read(path)
    assert [line["kind"] for line in lines] == ["awake", "root", "self_check", "batch", "step", "exit"]
    assert lines[-2]["ended"] == "exit" and (lines[-1]["steps"], lines[-1]["backwards"]) == (0, 1)


def test_a_process_that_does_not_train_leaves_two_marks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nwith torch.no_grad():\n    torch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    run(script, environment(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["armed.jsonl", "reached", "script.py"]


# BIT IDENTITY: the probe changes nothing that training computes ------------------------------------

IDENTITY = (
    PRELUDE
    + '''
import hashlib
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """Attention, dropout, a tied head, and two branches whose gradients are added up."""

    def __init__(self, recompute):
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.drop = nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(0.2)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def block(self, h):
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        return h + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def forward(self, ids):
        h = self.embed(ids)
        for _ in range(2):
            h = self.block(h) if self.recompute is None else checkpoint(self.block, h, use_reentrant=self.recompute)
        return self.head(h)


def bits(value):
    return value.detach().contiguous().view(torch.uint8).numpy().tobytes()


def train(dtype, autocast, recompute):
    torch.manual_seed(0)
    model = Model(recompute).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, seen = torch.randint(0, 32, (4, 12)), []
    for _ in range(3):
        for micro in torch.utils.data.DataLoader(ids, batch_size=2, shuffle=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(micro).float().flatten(0, 1), micro.flatten()) / 2
            loss.backward()
            seen.append(bits(loss.reshape(1)))
        seen.append(bits(nn.utils.clip_grad_norm_(model.parameters(), 0.5).reshape(1)))
        optimizer.step()
        optimizer.zero_grad()
    seen += [bits(p) for p in model.parameters()]
    return hashlib.sha256(b"".join(seen)).hexdigest(), bits(torch.rand(1)).hex()


CASES = {
    "fp32": (torch.float32, False, None),
    "bf16 autocast": (torch.float32, True, None),
    "bf16 parameters": (torch.bfloat16, False, None),
    "non-reentrant": (torch.float32, False, False),
    "reentrant autocast": (torch.float32, True, True),
    "bf16 non-reentrant": (torch.bfloat16, False, False),
}
print(json.dumps({name: train(*case) for name, case in CASES.items()}))
'''
)


def test_bit_identity_losses_norms_weights_and_random_state_are_the_same_with_the_probe(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IDENTITY)
    without, under = run(script, environment(None)), run(script, environment(tmp_path))
    assert json.loads(under) == json.loads(without)
    (path,) = tmp_path.glob("events.*.jsonl")
    steps = [line for line in read(path) if line["kind"] == "step"]
    assert len(steps) == 18 and all(line["ended"] == "step" and line["backwards"] == 2 for line in steps)
    assert not [line for line in read(path) if line["kind"] in ("probe_error", "nonfinite")]
    batches = [line for line in read(path) if line["kind"] == "batch"]
    assert {line["matched"] for line in batches} == {"content"} and len(batches) == 36
