"""The trace of one step in real trainings: which operation, phase, module and line, and that no bit changes.

The bank in tests/cases has one training for each public fault; here stand the mechanisms. Scenarios are
texts, run as in test_probe: a line marked `# birth` is the one that the trace must name.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanbisect.ports import free_port
from tests.test_probe import PROBE, SCRIPTS, Seen, Test, all_seen, environment, read, scenario, seen  # noqa: F401 - two are fixtures

pytestmark = pytest.mark.training

TRACE = """
from torch.utils.checkpoint import checkpoint

def trace(step=None, later=False):
    os.environ["NANBISECT_TRACE"] = str(step or probe()._observer.window.step)
    probe().moved(os.environ["NANBISECT_PROBE"])
    if later:
        probe()._observer.steps.trace.mode.later = True

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask, pad):
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) + torch.zeros(mask.shape).masked_fill(mask, -INF)
        weights = scores.softmax(-1)  # birth
        mixed = weights.masked_fill(pad[..., None], 0) @ value
        return x + self.out(mixed)

class Speech(nn.Module):
    def __init__(self, way="off"):
        super().__init__()
        self.embed, self.head, self.way = nn.Embedding(10, 8), nn.Linear(8, 10), way
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, input_ids, attention_mask):
        x, pad = self.embed(input_ids), attention_mask == 0
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1) | pad[:, None]
        for layer in self.layers:
            if self.way == "off":
                x = layer(x, mask, pad)
            else:
                x = checkpoint(layer, x, mask, pad, use_reentrant=self.way == "reentrant")
        return self.head(x)

def speech(way="off", padded=2, call=lambda loss: loss.backward()):
    torch.manual_seed(0)
    model = Speech(way)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, mask = torch.randint(1, 10, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, :padded] = 0
    logits = model(ids, attention_mask=mask)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.masked_fill(mask == 0, -100).flatten())
    call(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return model, loss

def train(module, *batches, loss=lambda y: y.sum(), optimizer=None):
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in batches:
        loss(module(batch)).backward()
    optimizer.step()
    return module

class Do(nn.Module):
    def __init__(self, work, *shape, value=1.0):
        super().__init__()
        self.weight, self.work = nn.Parameter(torch.full(shape or (3,), value)), work

    def forward(self, x):
        return self.work(self.weight, x)
"""
LINK = {"operation", "phase", "module", "source", "kind", "label", "node"}


def traced(script: str) -> Callable[[Test], Test]:
    """A scenario that has the models above."""
    return scenario(TRACE + "\n" + textwrap.dedent(script))


class Told:
    """The `origin` event of a scenario."""

    def __init__(self, seen: Seen, test: str) -> None:  # noqa: F811
        (self.event,) = seen.kind("origin")
        self.test = test
        assert {"step", "rank", "seconds"} <= set(self.event)
        for link in (*self.event["chain"], *self.event["also"], *self.event["hidden_by"]):
            assert set(link) == LINK

    @property
    def origin(self) -> dict[str, Any]:
        """Where it was born."""
        assert self.event["found"], self.event["reason"]
        origin: dict[str, Any] = self.event["origin"]
        return origin

    def is_at(self, operation: str, phase: str, module: str | None, label: str, *, mark: str = "birth") -> None:
        """The origin is this, and its line has the mark."""
        found = self.origin
        assert (found["operation"], found["phase"], found["module"], found["label"]) == (
            operation, phase, module, label,
        )  # fmt: skip
        lines = SCRIPTS[self.test].splitlines()
        assert f"# {mark}" in lines[int(found["source"].split(":")[1]) - 1], found["source"]

    @property
    def chain(self) -> list[tuple[str, str, str]]:
        """operation, phase and label of every link."""
        return [(link["operation"].split(".")[1], link["phase"], link["label"]) for link in self.event["chain"]]


@pytest.fixture
def told(request: pytest.FixtureRequest, seen: Seen) -> Told:  # noqa: F811
    """The origin event of this test's scenario."""
    return Told(seen, request.node.name)


# the demo's fault ------------------------------------------------------------------------------


def _is_the_first_softmax(told: Told) -> None:
    told.is_at("aten._softmax", "forward", "layers.0", "NaN from Inf")
    origin = told.origin
    assert origin["kind"] == "nan" and origin["sample"] == 1 and origin["position"] == 0
    assert origin["rows"] == [{"sample": 1, "positions": [0, 1], "count": 12}]
    (taken,), (given,) = origin["inputs"], origin["outputs"]
    assert (taken["nan"], taken["neginf"], taken["shape"]) == (0, 41, [2, 6, 6])
    assert (given["nan"], given["numel"], given["first"], given["max"]) == (12, 72, [1, 0, 0], 1.0)
    assert [link["module"] for link in told.event["also"]] == ["layers.1"]
    assert told.event["hidden_by"][0]["operation"] == "aten.masked_fill"
    assert told.event["nan_at"] == 2
    assert told.chain[:4] == [
        ("masked_fill", "forward", "intended Inf"),
        ("add", "forward", "bad->bad"),
        ("_softmax", "forward", "NaN from Inf"),
        ("masked_fill", "forward", "masking"),
    ]
    assert told.event["chain"][-1]["phase"] == "backward"
    assert told.event["surfaced"]["phase"] == "backward"


@traced("trace(); speech()")
def test_a_masked_row_is_named_in_forward_where_zeroing_hides_it(told: Told) -> None:
    _is_the_first_softmax(told)
    assert ("_softmax_backward_data", "backward", "bad->bad") in told.chain
    (kernel,) = [each for each in told.event["kernels"] if each["phase"] == "forward"]
    assert (kernel["kernel"], kernel["calls"], kernel["masked_rows"]) == ("eager softmax", 2, 4)
    assert (kernel["queries"], kernel["modulo"]) == (6, [[6, 6], [6, 6]])
    assert told.event["before"][-1]["min"] == "-inf" and len(told.event["before"]) > 5


@traced("trace(); speech('on')")
def test_recompute_is_told_from_backward(told: Told) -> None:
    _is_the_first_softmax(told)
    assert ("_softmax", "recompute", "NaN from Inf") in told.chain
    assert {each["phase"] for each in told.event["kernels"]} == {"forward", "recompute"}


@traced("trace(); speech('reentrant')")
def test_recompute_of_the_reentrant_kind_is_told_from_backward(told: Told) -> None:
    _is_the_first_softmax(told)
    assert ("_softmax", "recompute", "NaN from Inf") in told.chain


@traced("""
    import threading

    def elsewhere(loss):  # as on a device, where backward has a thread of its own
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    trace()
    speech('reentrant', call=elsewhere)
""")
def test_lines_are_right_where_backward_runs_on_another_thread(told: Told) -> None:
    _is_the_first_softmax(told)
    lines = {link["source"] for link in told.event["chain"] if link["phase"] == "backward"}
    assert None not in lines
    assert told.event["chain"][-1]["module"].startswith("layers.0")


@traced("""
    trace(later=True)
    speech('on')
""")
def test_ranges_that_are_read_later_tell_the_same(told: Told) -> None:
    _is_the_first_softmax(told)


@traced("""
    def bits(wanted):
        if wanted:
            trace()
        model, loss = speech('on', padded=0)
        return [x.detach().view(torch.int32).tolist() for x in (loss.reshape(1), *model.parameters())]

    def dropping(wanted):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        if wanted:
            trace()
        train(model, torch.randn(8, 4), torch.randn(8, 4))
        return [x.detach().tolist() for x in (*model.parameters(), *model.buffers())]

    note(same=bits(False) == bits(True), dropped=dropping(False) == dropping(True))
""")
def test_the_trace_changes_no_bit(seen: Seen) -> None:  # noqa: F811
    assert seen.note == {"same": True, "dropped": True}
    first, second = seen.kind("origin")
    assert (first["found"], first["reason"]) == (False, "nothing non-finite surfaced in step 2")
    assert (first["operations"] > 100, second["step"], second["operations"] > 20) == (True, 4, True)


# births ----------------------------------------------------------------------------------------


@traced("""
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.wo, self.norm = nn.Linear(64, 64, bias=False).half(), nn.LayerNorm(64)
            self.wo.weight.data.fill_(30.0)

        def forward(self, x):
            y = self.wo(x.half())  # birth
            return self.norm(y.float())

    trace()
    train(Blocks(), torch.full((1, 64), 300.0))
""")
def test_an_overflow_is_the_birth_of_the_nan_that_comes_of_it(told: Told) -> None:
    told.is_at("aten.mm", "forward", "wo", "origin")
    assert told.origin["kind"] == "+inf"
    assert told.chain[told.event["nan_at"]] == ("native_layer_norm", "forward", "NaN from Inf")
    assert told.event["hidden_by"] == []
    assert told.event["chain"][told.event["nan_at"]]["module"] == "norm"
    assert [each["absmax"] for each in told.origin["inputs"]] == [300.0, 30.0]
    assert told.origin["outputs"][0]["posinf"] == 64 and told.origin["outputs"][0]["min"] is None


@traced("""
    trace()
    train(Do(lambda weight, x: weight), torch.ones(3), loss=lambda y: (-y).log().sum())  # birth
""")
def test_the_logarithm_whose_gradient_is_finite(told: Told) -> None:
    told.is_at("aten.log", "loss", None, "origin")
    assert told.event["surfaced"]["phase"] == "loss"


@traced("""
    def chosen(weight, x):
        return torch.where(weight > 0, weight.log(), x)  # birth

    trace()
    train(Do(chosen, value=0.0), torch.zeros(3))
""")
def test_the_branch_that_was_not_chosen(told: Told) -> None:
    told.is_at("aten.div", "backward", "", "origin")
    assert told.origin["node"] == "LogBackward0"


@traced("""
    def root(weight, x):
        return weight.sqrt() * x  # birth

    trace()
    train(Do(root, value=0.0), torch.ones(3))
""")
def test_an_infinite_gradient_without_any_nan(told: Told) -> None:
    told.is_at("aten.div", "backward", "", "origin")
    assert (told.origin["kind"], told.event["nan_at"]) == ("+inf", None)


@traced("""
    def labels(y):
        return F.cross_entropy(y, torch.tensor([-100, -100]))  # birth

    trace()
    train(nn.Linear(3, 5), torch.ones(2, 3), loss=labels)
""")
def test_a_mean_over_no_label(told: Told) -> None:
    told.is_at("aten.nll_loss_forward", "loss", None, "origin")
    logits, target = told.origin["inputs"]
    assert (logits["dtype"], target["dtype"], target["min"], target["max"]) == ("float32", "int64", -100, -100)


@traced("""
    trace()
    model, big = Do(lambda weight, x: weight * x, 2), torch.tensor([3e38, 1.0])
    model(big).sum().backward()
    model(big).sum().backward()  # birth
    torch.optim.SGD(model.parameters(), lr=0.1).step()
""")
def test_a_sum_of_gradients_that_overflows(told: Told) -> None:
    told.is_at("aten.add_", "backward", None, "origin")
    assert (told.origin["name"], told.event["micro_batch"]) == ("weight", 1)


@traced("""
    def twice(weight, x):
        return weight * 1e30 * 1e30 * x  # birth

    trace()
    train(Do(twice, 2, value=1e-30), torch.ones(2), -torch.ones(2))
""")
def test_infinities_of_both_signs_that_meet_while_gradients_add_up(told: Told) -> None:
    told.is_at("aten.mul", "backward", "", "origin")
    assert told.origin["kind"] == "+inf" and told.event["micro_batch"] == 0


@traced("""
    model = nn.Linear(4, 4).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8, foreach=True)
    trace()
    model(torch.zeros(1, 4).half()).float().sum().backward()
    optimizer.step()  # birth
""")
def test_an_epsilon_of_zero_in_an_operation_that_returns_nothing(told: Told) -> None:
    told.is_at("aten._foreach_addcdiv_", "optimizer", None, "origin")
    assert told.origin["name"] == "weight"
    assert [each["name"] for each in told.origin["inputs"]] == ["weight", "tensor1", "tensor2"]
    assert [each["before"] for each in told.origin["inputs"]] == [True, False, False]
    assert (told.origin["inputs"][0]["nan"], told.origin["outputs"][0]["nan"]) == (0, 16)
    assert told.event["surfaced"]["phase"] == "optimizer"


@traced("""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)

    def packed(weight, x):
        scratch = torch.empty(4)  # made
        scratch[:2] = x
        return scratch * weight  # birth

    trace()
    train(Do(packed, 4), torch.ones(2))
""")
def test_memory_that_is_read_before_it_is_written(told: Told) -> None:
    told.is_at("aten.mul", "forward", "", "unwritten storage")
    assert told.origin["allocated"]["operation"] == "aten.empty"
    line = int(told.origin["allocated"]["source"].split(":")[1])
    assert "# made" in SCRIPTS[told.test].splitlines()[line - 1]


@traced("""
    class Zero(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x / x  # birth

    trace()
    train(Do(lambda weight, x: Zero.apply(weight * x)), torch.zeros(3))
""")
def test_a_line_in_a_backward_of_the_users_own(told: Told) -> None:
    told.is_at("aten.div", "backward", "", "origin")
    assert told.origin["node"] == "ZeroBackward"


@traced("""
    def drawn(weight, x):
        factor = x
        if drawn.again:
            factor = (x - x) / (x - x)  # birth
        drawn.again = True
        return weight * factor

    def forward(weight, x):
        return checkpoint(drawn, weight, x, use_reentrant=False)

    drawn.again = False
    trace()
    train(Do(forward), torch.ones(3))
""")
def test_a_recomputation_that_differs(told: Told) -> None:
    told.is_at("aten.div", "recompute", "", "origin")
    assert told.origin["forward_was_finite"] is None  # another line ran in forward


# what was there before -------------------------------------------------------------------------


@traced("""
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

        def forward(self, ids):
            return self.head(self.embed(ids))  # birth

    model = Tokens()
    model.embed.weight.data[0] = NAN
    trace()
    train(model, torch.tensor([[3, 0]]))
""")
def test_a_bad_row_of_a_parameter(told: Told) -> None:
    told.is_at("aten.embedding", "load", "embed", "origin")
    assert told.origin["name"] == "embed.weight"
    (loaded,) = told.event["loaded"]
    assert (loaded["name"], loaded["value"], loaded["nan"], loaded["first"]) == ("embed.weight", "nan", 4, [0, 0])
    assert loaded["first_use"]["operation"] == "aten.embedding"


@traced("""
    trace()
    train(nn.Linear(3, 2), torch.tensor([[1.0, NAN, 1.0]]))  # not marked
""")
def test_a_bad_batch(told: Told) -> None:
    assert (told.origin["phase"], told.origin["operation"], told.origin["name"]) == ("data", "aten.addmm", "0")


@traced("""
    def attend(weight, x, mask):
        return (weight * x + mask).softmax(-1)  # birth

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x, mask):
            return attend(self.weight, x, mask)

    trace()
    Masked()(torch.ones(2, 3), torch.tensor([[0.0, -INF, -INF], [-INF, -INF, -INF]])).sum().backward()
""")
def test_a_mask_that_comes_with_the_batch_is_no_origin(told: Told) -> None:
    told.is_at("aten._softmax", "forward", "", "NaN from Inf")
    assert told.chain[0] == ("add", "forward", "intended Inf")


@traced("""
    model = nn.Sequential(nn.Linear(3, 2))
    trace()
    train(model, torch.tensor([[1.0, -INF, INF]]))
""")
def test_an_infinity_in_the_batch_that_is_no_mask(told: Told) -> None:
    assert (told.origin["phase"], told.origin["operation"], told.origin["label"]) == ("data", "aten.addmm", "origin")


@traced("""
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    trace()
    train(model, torch.tensor([[1, 2]]), loss=lambda y: (y - y.detach()).sqrt().sum())  # birth
""")
def test_a_sparse_gradient(told: Told) -> None:
    told.is_at("aten.div", "backward", None, "origin")
    assert told.event["surfaced"]["name"] == "0.weight"


@traced("""
    model = Do(lambda weight, x: (weight - 1.0).sqrt() * x)  # birth
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3)).sum()
        loss.backward()
        return loss

    trace()
    optimizer.step(closure)
""")
def test_a_closure_is_no_optimizer(told: Told) -> None:
    told.is_at("aten.div", "backward", "", "origin")


# beside the origin -----------------------------------------------------------------------------


@traced("""
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(Burn.apply(self.embed(ids), NAN))

    trace()
    train(Tied(), torch.tensor([[3, 1]]))
""")
def test_which_use_of_a_tied_weight(told: Told) -> None:
    assert (told.event["use"]["use"], told.event["use"]["module"]) == ("lookup", "embed")


@traced("""
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.text, self.sound = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.text(self.trunk(x)), Burn.apply(self.sound(self.trunk(x)), NAN)

    def loss(both):
        text = both[0].square().mean()
        sound = both[1].abs().mean()  # sound
        return text + 32 * sound

    trace()
    train(Heads(), torch.ones(1, 3), loss=loss)
""")
def test_which_addend_of_the_loss_reaches_the_bad_gradient(told: Told) -> None:
    text, sound = sorted(told.event["addends"], key=lambda each: int(each["source"].split(":")[1]))
    assert (text["reaches"], sound["reaches"], text["bad"], sound["bad"]) == (False, True, False, False)
    assert "# sound" in SCRIPTS[told.test].splitlines()[int(sound["source"].split(":")[1]) - 1]


@traced("""
    def grow(weight, x):
        large = weight * x * 1e20  # jump
        return (large * 1e10 * 1e10).cos()  # birth

    trace()
    train(Do(grow), torch.ones(3))
""")
def test_growth_on_the_way_is_noted(told: Told) -> None:
    told.is_at("aten.mul", "forward", "", "origin")
    first = told.event["jumps"][0]
    assert (first["operation"], first["from"], first["to"]) == ("aten.mul", 1.0, pytest.approx(1e20))


@traced("""
    def attend(weight, x):
        y = x * weight
        allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
        allowed[..., 0, :] = False
        return F.scaled_dot_product_attention(y, y, y, attn_mask=allowed)

    trace()
    train(Do(attend, 8), torch.randn(1, 2, 4, 8))
""")
def test_the_attention_kernel_that_ran(told: Told) -> None:
    (kernel,) = [each for each in told.event["kernels"] if each["phase"] == "forward"]
    assert (kernel["kernel"], kernel["queries"], kernel["keys"]) == ("flash_cpu", 4, 4)
    assert kernel["masked_rows"] == 1
    assert told.event["found"] is False


@traced("""
    axes = sys.modules.get("_nanbisect_probe.trace_axes")
    if axes is None:
        trace()
        axes = sys.modules["_nanbisect_probe.trace_axes"]
    sizes = axes.sizes({"mask": torch.ones(2, 5), "codes": torch.ones(2, 5, 3, dtype=torch.long)})

    def places(*shape):
        bad = torch.zeros(shape)
        bad[-1] = NAN
        first = [shape[0] - 1] + [0] * (len(shape) - 1)
        spot = axes.place_of(first, shape, sizes)
        rows = axes.rows(bad, sizes)
        return list(spot.values()), rows and [[row["sample"], row["positions"], row["count"]] for row in rows]

    note(
        sizes=list(sizes), hidden=places(2, 5, 8), scores=places(2, 4, 5, 5), heads=places(8, 5, 5),
        channels=places(2, 5, 3),
        flat=places(10, 7), shifted=places(8, 7), pooled=places(2, 7), other=places(7, 7), one=places(2),
    )
""")
def test_samples_positions_and_channels_by_the_shape(seen: Seen) -> None:  # noqa: F811
    every = [0, 1, 2, 3, 4]
    assert seen.note == {
        "sizes": [2, 5, 3],
        "hidden": [[1, 0, None], [[1, every, 40]]],
        "scores": [[1, 0, None], [[1, every, 100]]],
        "heads": [[1, 0, None], [[1, every, 25]]],
        "channels": [[1, 0, 0], [[1, every, 15]]],
        "flat": [[1, 4, None], [[1, [4], 7]]],
        "shifted": [[1, 3, None], [[1, [3], 7]]],
        "pooled": [[1, None, None], [[1, None, 7]]],
        "other": [[None, None, None], None],
        "one": [[1, None, None], [[1, None, 1]]],
    }


# which step, and when not ----------------------------------------------------------------------


@traced("""
    trace(3)
    model = Do(lambda weight, x: weight * x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        train(model, torch.full((3,), NAN if step == 2 else 1.0), optimizer=optimizer)
    note(modes=len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
""")
def test_one_step_alone_is_traced(told: Told, seen: Seen) -> None:  # noqa: F811
    assert (told.event["step"], told.origin["phase"], told.event["operations"] < 40) == (3, "data", True)
    assert 0 < told.event["plain_seconds"] < 60 and told.event["seconds"] > 0
    assert seen.note["modes"] == 0


@traced("trace(9); train(nn.Linear(2, 2), torch.ones(1, 2))")
def test_a_step_that_never_came(told: Told) -> None:
    assert told.event["reason"] == "step 9 was not reached: the training ended in step 2"


@traced("""
    trace()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20)
    model, optimizer = net(Half.apply)
    for _ in range(2):
        scaler.scale(model(x()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""")
def test_an_overflow_that_a_scaler_absorbs_is_no_origin(told: Told) -> None:
    assert told.event["found"] is False
    assert "a GradScaler skipped it" in told.event["reason"]


@traced("""
    trace()
    book = probe()._observer.steps.trace.book
    book.take = lambda *_: 1 / 0
    model, loss = speech()
    note(loss=loss.item())
""")
def test_a_trace_that_fails_leaves_the_training_alone(request: pytest.FixtureRequest, all_seen: Any) -> None:  # noqa: F811
    found = all_seen[request.node.name]
    assert found.code == 0 and found.note["loss"] > 0
    (error,), (event,) = found.kind("probe_error"), found.kind("origin")
    assert "ZeroDivisionError" in error["error"] and event["reason"].startswith("the trace failed")
    assert found.kind("nonfinite")[0]["phase"] == "backward"


@traced("""
    before = sorted(name for name in sys.modules if "_nanbisect_probe.trac" in name)
    trace()
    model = torch.compile(Do(lambda weight, x: weight.sqrt() * x, value=0.0), backend="eager")
    train(model, torch.ones(3))
    note(before=before)
""")
def test_a_compiled_step_is_traced_eagerly_and_says_so(told: Told, seen: Seen) -> None:  # noqa: F811
    assert told.event["traced_in_eager"] is True
    assert told.origin["operation"] == "aten.div"
    assert seen.note["before"] == []  # without a trace none of it is imported


@traced("""
    trace()
    model = Do(lambda weight, x: weight * x)
    (gradient,) = torch.autograd.grad(model(torch.ones(3)).square().sum(), model.weight, create_graph=True)
    (gradient.sum() - 6.0).sqrt().backward()  # birth
    torch.optim.SGD(model.parameters(), lr=0.1).step()
""")
def test_a_backward_that_makes_a_graph_is_no_recomputation(told: Told) -> None:
    told.is_at("aten.div", "backward", None, "origin")


DDP = """
    import torch, torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        output = model(torch.ones(3, 4))
        if dist.get_rank() == 1 and step == 1:
            output = (output * 0).sqrt()
        output.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""


def test_one_rank_has_the_origin_and_the_other_got_it_by_reduction(tmp_path: Path) -> None:
    """Every process traces its own part of the step."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(DDP))
    argv = [sys.executable, "-m", "torch.distributed.run", "--master_port", str(free_port()), "--nproc_per_node", "2"]
    env = {**environment(tmp_path), "NANBISECT_TRACE": "2"}
    subprocess.run([*argv, str(script)], env=env, capture_output=True, timeout=120, check=False)  # gloo may abort
    lines = [line for path in sorted(tmp_path.glob("events.*")) for line in read(path)]
    assert not [line for line in lines if line["kind"] == "probe_error"]
    told = {line["rank"]: line["origin"] for line in lines if line["kind"] == "origin"}
    places = {number: (each["phase"], each["label"], each["operation"]) for number, each in told.items()}
    assert places == {
        0: ("reduce", "came by reduction", "c10d.allreduce_"),
        1: ("backward", "origin", "aten.div"),
    }
    assert told[1]["source"].endswith("train.py:13")


def test_every_field_of_the_schema_is_there() -> None:
    """The tables of links and tensors are what the driver reads."""
    text = (PROBE / "schema.py").read_text(encoding="utf-8")
    assert all(f'"{field}":' in text for field in LINK)
