"""What the probe leaves out to be cheap (sums before ranges, some looks in long runs) hides no value."""

from __future__ import annotations

import pytest

from tests.test_probe import Seen, all_seen, scenario, seen  # noqa: F401 - two are fixtures
from tests.test_probe_commands import limited

pytestmark = pytest.mark.training


# sums ------------------------------------------------------------------------------------------


@scenario("""
    numbers = sys.modules["_nanbisect_probe.numbers"]
    KINDS = {NAN: "nan", INF: "+inf", -INF: "-inf"}
    torch.manual_seed(0)
    wrong, looked, summed = [], 0, 0

    def expect(tensor, wanted, *what):
        global looked, summed
        looked += 1
        found = numbers.look(tensor)
        summed += found is numbers.FINITE
        kind = numbers.kind(*numbers.read([found])[0])
        if kind != wanted:
            wrong.append([str(part) for part in (*what, wanted, kind)])

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        top = torch.finfo(dtype).max
        for size in (1, 2, 31, 64, 1000, 4097, 70000):
            small = torch.randn(size).to(dtype)
            signs = torch.ones(size, dtype=dtype)
            signs[::2] = -1
            bases = {"small": small, "top": signs.abs() * top, "bottom": signs.abs() * -top, "both": signs * top}
            for name, base in bases.items():
                expect(base, None, dtype, size, name)
                expect(base.expand(3, size).T, None, dtype, size, name, "transposed")
                for value, kind in KINDS.items():
                    for place in {0, size // 2, size - 1}:
                        bad = base.clone()
                        bad[place] = value
                        expect(bad, kind, dtype, size, name, place)
                        expect(bad.expand(3, size).T, kind, dtype, size, name, place, "transposed")
                if size > 1:
                    bad = base.clone()
                    bad[0], bad[-1] = INF, -INF
                    expect(bad, "+inf", dtype, size, name, "both")
    note(wrong=wrong[:5], looked=looked, summed=summed, empty=numbers.look(torch.zeros(0)) is None)
""")
def test_a_sum_misses_nothing_and_its_overflow_is_no_finding(seen: Seen) -> None:  # noqa: F811
    assert seen.note["wrong"] == [] and seen.note["empty"]
    assert 50 < seen.note["summed"] < seen.note["looked"] / 2  # both ways were taken


@scenario("""
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(2e38)
        model.bias.fill_(2e38)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30, momentum=0.05)
    for _ in range(2):
        sum((Burn.apply(parameter, 3e38) * 0).sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
""")
def test_large_healthy_values_are_no_event(seen: Seen) -> None:  # noqa: F811
    assert not seen.kind("nonfinite") and [line["gradients"] for line in seen.steps] == [2, 2]


@scenario("""
    from torch.utils._python_dispatch import TorchDispatchMode
    class NoSums(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sum.default:
                raise ValueError("no sums here")
            return func(*args, **(kwargs or {}))
    model, optimizer = net()
    with NoSums():
        model(x()).square().mean().backward()
    optimizer.step()
    note(done=True)
""")
def test_a_sum_that_raises_breaks_no_backward_and_loses_no_gradient(seen: Seen) -> None:  # noqa: F811
    assert seen.note == {"done": True} and seen.steps[0]["gradients"] == 6


TIED = """
    embed, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, nn.Linear(4, 4), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(3):
        hidden = embed(torch.tensor([1, 2]))
        hidden = Burn.apply(hidden, {lookup}, False) if number == 1 else hidden
        logits = head(model[1](hidden))
        logits = Burn.apply(logits, {head}, False) if number == 1 else logits
        logits.sum().backward()
        note(held=len(probe()._observer.arrivals.held))
        optimizer.zero_grad()
"""


@scenario(TIED.format(lookup="NAN", head="1.0"))
def test_the_last_use_of_a_tied_weight_is_looked_at_when_the_sum_is_bad(seen: Seen) -> None:  # noqa: F811
    event = seen.kind("nonfinite")[0]
    assert [tensor["name"] for tensor in event["tensors"]] == ["0.weight"]
    assert event["tensors"][0]["uses"] == ["lookup (EmbeddingBackward0)"] and seen.note == {"held": 0}


@scenario(TIED.format(lookup="NAN", head="INF"))
def test_both_uses_of_a_tied_weight_may_be_bad(seen: Seen) -> None:  # noqa: F811
    event = seen.kind("nonfinite")[0]
    (weight,) = (tensor for tensor in event["tensors"] if tensor["name"] == "0.weight")
    assert weight["uses"] == ["head (MmBackward0)", "lookup (EmbeddingBackward0)"]


# buffers ---------------------------------------------------------------------------------------


@scenario("""
    model, optimizer = net()
    model.inner = nn.Module()
    model.inner.register_buffer("running", torch.zeros(4))
    model.inner.register_buffer("kept", torch.zeros(4))
    def replace(x):
        model.inner.running = torch.full((4,), NAN)
        return x
    model.burn = replace
    step(model, optimizer)
""")
def test_a_buffer_that_forward_replaces_by_a_bad_one(seen: Seen) -> None:  # noqa: F811
    assert (seen.nonfinite["phase"], seen.names) == ("forward", ["inner.running"])
    assert seen.nonfinite["of"] == 2


@scenario("""
    model, optimizer = net()
    def add(x):
        model.third.register_buffer("late", torch.full((4,), NAN))
        return x
    model.burn = add
    step(model, optimizer)
""")
def test_a_buffer_that_forward_registers(seen: Seen) -> None:  # noqa: F811
    assert (seen.nonfinite["phase"], seen.names) == ("forward", ["third.late"])


# long runs -------------------------------------------------------------------------------------

POISONED = """
    limit({limits})

    def train(last):
        torch.manual_seed(0)
        model = nn.Module()
        model.used, model.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        model.forward = lambda x: model.used(x)
        optimizer = torch.optim.{optimizer}
        data = iter(torch.utils.data.DataLoader([torch.full((4,), float(i)) / 400 for i in range(400)]))
        for number in range(1, last + 1):
            model(next(data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 73:
                with torch.no_grad():
                    {poison}
        return model, optimizer
"""
ADAM = "Adam(model.used.parameters(), lr=1e-3)"
STATE = "optimizer.state[model.used.weight]['exp_avg_sq'][0, 0] = INF  # from now on it stands still"


def poisoned(poison: str, call: str, *, limits: str = "NANBISECT_STOP=''", optimizer: str = ADAM) -> str:
    """A run in which a value becomes non-finite after step 73, without any effect on losses or gradients."""
    return POISONED.format(limits=limits, poison=poison, optimizer=optimizer) + f"\n    {call}\n"


@limited(poisoned(STATE, "kept = train(82)"))
def test_in_a_long_run_bad_state_is_found_late_and_says_since_when(seen: Seen) -> None:  # noqa: F811
    event = seen.kind("nonfinite")[0]
    assert (event["step"], event["since"], event["phase"], event["value"]) == (80, 60, "optimizer", "+inf")
    assert [tensor["name"] for tensor in event["tensors"]] == ["used.weight.exp_avg_sq"]
    steps = [line["step"] for line in seen.kind("batch") if line["step"] > 50]
    assert steps == [*range(61, 83)]  # all in which it may have arisen, and two more


@limited(poisoned(STATE, "kept = train(76)"))
def test_at_the_end_of_a_long_run_state_is_looked_at_once_more(seen: Seen) -> None:  # noqa: F811
    event = seen.nonfinite
    assert (event["step"], event["since"], event["value"]) == (76, 60, "+inf")
    assert seen.lines[-1]["unseen_since"] is None and seen.lines[-1]["events"] == 1


@limited(poisoned("pass", "train(76)"))
def test_state_that_is_gone_at_the_end_is_said_to_be_unseen(seen: Seen) -> None:  # noqa: F811
    assert not seen.kind("nonfinite") and seen.lines[-1]["unseen_since"] == 60


@limited(poisoned("pass", "train(76)", optimizer="SGD([*model.used.parameters()], lr=1e-3); del model.frozen"))
def test_an_optimizer_without_state_leaves_nothing_unseen(seen: Seen) -> None:  # noqa: F811
    assert seen.lines[-1]["unseen_since"] is None


@limited(poisoned("model.frozen.weight[0, 0] = NAN", "kept = train(90)"))
def test_frozen_parameters_are_looked_at_with_the_state(seen: Seen) -> None:  # noqa: F811
    event = seen.kind("nonfinite")[0]
    assert (event["step"], event["since"], event["phase"]) == (80, 60, "optimizer")
    assert [tensor["name"] for tensor in event["tensors"]] == ["frozen.weight"]


BREAKS = """
    limit(NANBISECT_STOP="")
    model, _ = net()
    class Breaking(torch.optim.SGD):
        number = 0
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            self.number += 1
            if self.number == 73:
                model.second.weight[1, 1] = NAN
    optimizer = Breaking(model.parameters(), lr=0.01)
    for number in range(73):
        step(model, optimizer)
"""


@limited(BREAKS)
def test_a_parameter_is_found_in_its_own_step_and_in_the_last_one(seen: Seen) -> None:  # noqa: F811
    event = seen.nonfinite
    assert (event["step"], event["since"], event["phase"], event["value"]) == (73, None, "optimizer", "nan")
    assert seen.names == ["second.weight"]


@limited(poisoned(STATE, "kept = train(76)", limits="NANBISECT_STOP='event', NANBISECT_STEPS='200'"))
def test_in_a_run_with_an_end_state_is_found_in_its_own_step(seen: Seen) -> None:  # noqa: F811
    event = seen.nonfinite
    assert (event["step"], event["since"]) == (74, None)  # the step after the script itself had spoilt it


# the clock -------------------------------------------------------------------------------------


@scenario("""
    model, optimizer = net()
    for _ in range(3):
        step(model, optimizer, clip=1.0)
""")
def test_the_probe_times_itself(seen: Seen) -> None:  # noqa: F811
    last = seen.lines[-1]
    own = [line["probe_seconds"] for line in seen.steps]
    assert all(0 < line["probe_seconds"] < line["seconds"] for line in seen.steps)
    assert sum(own) < last["probe_seconds"] < sum(line["seconds"] for line in seen.steps) and last["seconds"] > 0


@scenario("""
    probe()._observer.clock.taken = probe()._observer.clock.seconds = 1000.0  # a server's imports
    probe().moved(probe()._observer.journal.folder)
    model, optimizer = net()
    step(model, optimizer)
""")
def test_a_warm_start_begins_with_a_clock_of_its_own(seen: Seen) -> None:  # noqa: F811
    assert 0 < seen.steps[0]["probe_seconds"] < seen.lines[-1]["probe_seconds"] < 1000
