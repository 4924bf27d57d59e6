"""The probe where a script sees the NaN before anybody else: it skips the batch, swallows the error, or gives up.

No gradient shows such a NaN, and a run without one must not be called finite for that.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_probe import Seen, all_seen, environment, read, scenario, seen  # noqa: F401 - two are fixtures
from tests.test_probe_commands import kind, limited

pytestmark = pytest.mark.training


# skipped batches -------------------------------------------------------------------------------


@scenario("""
    model, optimizer = net()
    rows = torch.arange(24.0).reshape(6, 4) / 24
    for number in range(3):
        loss = model(rows[2 * number : 2 * number + 2]).square().mean()
        loss = loss * NAN if number == 1 else loss
        if not loss.isfinite():
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""")
def test_a_skipped_loss_is_an_event_without_a_data_loader_too(seen: Seen) -> None:  # noqa: F811
    assert (seen.nonfinite["phase"], seen.nonfinite["step"], seen.nonfinite["backward"]) == ("loss", 2, False)
    first, third, skipped = seen.kind("batch")
    assert not skipped["backward"] and first["backward"] and third["backward"]
    assert len({mark for line in (first, third, skipped) for mark in line["contents"]}) == 6


STEP_OF_ITS_OWN = """
    def one(batch, bad):
        loss = model(batch).square().mean()
        loss = loss * NAN if bad else loss
        if {check}:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    from torch.utils.data import DataLoader
    model, optimizer = net()
    for number, batch in enumerate(DataLoader([x()[0] + i for i in range(4)], batch_size=1)):
        one(batch, number == 1)
"""


@scenario(STEP_OF_ITS_OWN.format(check="math.isfinite(loss.item())"))
def test_a_loss_that_was_looked_at_is_known_when_it_is_gone(seen: Seen) -> None:  # noqa: F811
    """A function computed it, asked whether it is a number, and returned."""
    assert (seen.nonfinite["phase"], seen.nonfinite["step"], seen.nonfinite["backward"]) == ("loss", 2, False)
    assert [line["indices"] for line in seen.kind("batch") if not line["backward"]] == [[1]]


@scenario("""
    import warnings
    warnings.simplefilter("ignore")
    asked = [
        torch.isfinite, torch.isnan, torch.isinf, lambda t: t.isfinite(), lambda t: t.isnan(), lambda t: t.isinf(),
        math.isnan, float, lambda t: t.item(), lambda t: t.tolist(), lambda t: float(t.detach()),
    ]
    model, _ = net()
    found = []
    for ask in asked:
        loss = model(x()).mean() * NAN
        assert ask(loss) in (True, False) or math.isnan(ask(loss))
        waiting = probe()._observer._waiting()
        found.append(len(waiting.seen))
        loss.detach_()
    with open(os.path.join(HERE, "scripted.py"), "w") as file:
        file.write("import torch\\ndef script(x):\\n    return torch.isnan(x), x.isfinite(), x.detach()\\n")
    sys.path.insert(0, HERE)
    from scripted import script
    note(found=found, kept=torch.isnan.__name__, scripted=str(torch.jit.script(script)(torch.zeros(1))))
""")
def test_every_way_to_ask_is_heard(seen: Seen) -> None:  # noqa: F811
    """And TorchScript still knows them."""
    assert all(seen.note["found"]) and seen.note["kept"] == "isnan", seen.note
    assert seen.note["scripted"] == "(tensor([False]), tensor([True]), tensor([0.]))"


@scenario(STEP_OF_ITS_OWN.format(check="loss < INF"))
def test_a_loss_that_is_gone_is_no_guess(seen: Seen) -> None:  # noqa: F811
    """Nobody can say what it was: a note, and the batch does not count as trained on."""
    assert seen.repairs == ["forward_without_backward"] and not seen.kind("nonfinite")
    assert [line["indices"] for line in seen.kind("batch")] == [[0], [2], [3]]


@scenario("""
    from torch.utils.data import DataLoader
    model, optimizer = net()
    loader = DataLoader([x()[0] + i for i in range(6)], batch_size=2)
    first, second, third = loader
    losses = [model(first).square().mean(), model(second).square().mean()]
    for loss in losses:
        loss.backward()
    optimizer.step()
    for batch, other in ((third, first), (second, third)):
        (model(batch).square().mean() + model(other).mean()).backward()
        optimizer.step()
    note(scanned=probe()._observer.unhanded.left)
""")
def test_several_forwards_before_their_backward_are_no_skip(seen: Seen) -> None:  # noqa: F811
    """Each in a backward of its own, or two batches in one."""
    assert not seen.repairs and not seen.kind("nonfinite")
    places = [(line["step"], line["micro_batch"], line["indices"]) for line in seen.kind("batch")]
    assert places[:2] == [(1, 0, [0, 1]), (1, 1, [2, 3])]


@scenario("""
    policy, optimizer = net()
    for _ in range(2):
        scores = []
        for part in x():
            score = policy(part).sum()
            scores.append(score)
            unused = score * INF  # alive, non-finite and on the graph
        sum(scores).square().backward()
        optimizer.step()
        optimizer.zero_grad()
""")
def test_a_number_beside_the_loss_is_not_the_loss(seen: Seen) -> None:  # noqa: F811
    """The backward goes through both forwards, so neither was skipped."""
    assert seen.ended == ["step", "step"] and not seen.kind("nonfinite") and not seen.repairs


@scenario("""
    class Metric(nn.Module):
        def forward(self, found):
            return found.detach().mean() * NAN
    from torch.utils.data import DataLoader
    model, optimizer, metric = *net(), Metric()
    for number, batch in enumerate(DataLoader([x()[0] + i for i in range(3)], batch_size=1)):
        loss = model(batch).square().mean()
        metric(loss)
        if number != 1:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
""")
def test_a_metric_is_no_loss(seen: Seen) -> None:  # noqa: F811
    """A batch was skipped for some other reason, and its loss was finite."""
    assert seen.repairs == ["forward_without_backward"] and not seen.kind("nonfinite")


@scenario("""
    from torch.utils.data import DataLoader
    model, optimizer, criterion = *net(), nn.MSELoss()
    def one(batch, bad):
        loss = criterion(model(batch), batch * (NAN if bad else 1.0))
        if loss.isfinite():
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for number, batch in enumerate(DataLoader([x()[0] + i for i in range(3)], batch_size=1)):
        one(batch, number == 1)
""")
def test_the_loss_of_a_loss_module_is_known_when_it_is_gone(seen: Seen) -> None:  # noqa: F811
    assert (seen.nonfinite["phase"], seen.nonfinite["step"], seen.nonfinite["backward"]) == ("loss", 2, False)


@limited("""
    limit(NANBISECT_STOP="event")
    model, optimizer = net()
    def one(rows):
        loss = model(rows).square().mean() * NAN
        assert not loss.isfinite()
    for number in range(1000):
        note(number=number)
        one(x() + number)
""")
def test_a_script_that_skips_every_batch_is_heard_before_its_end(seen: Seen) -> None:  # noqa: F811
    assert seen.note["number"] < 200 and seen.kind("nonfinite")[0]["backward"] is False


@scenario("""
    from torch.utils.data import DataLoader
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        def forward(self, x):
            return self.body(x)
    def one(rows, bad):
        loss = model.head(model(rows)).square().mean()  # the head is called by the script
        loss = loss * NAN if bad else loss
        if math.isfinite(loss.item()):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, rows in enumerate(DataLoader([x()[0] + i for i in range(4)], batch_size=1)):
        one(rows, number == 1)
""")
def test_a_skipped_batch_of_a_model_whose_parts_the_script_calls(seen: Seen) -> None:  # noqa: F811
    assert (seen.nonfinite["phase"], seen.nonfinite["step"], seen.nonfinite["backward"]) == ("loss", 2, False)
    batches = [(line["module"], line["indices"], line["backward"]) for line in seen.kind("batch")]
    assert sorted(batches) == [("Heads", [i], i != 1) for i in range(4)]


@scenario("""
    from torch.utils.data import DataLoader
    model, optimizer = net()
    rows = iter(DataLoader([x()[0] + i for i in range(520)], batch_size=1))
    for _ in range(260):
        for loss in [model(next(rows)).square().mean(), model(next(rows)).square().mean()]:
            loss.backward()
    optimizer.step()
""")
def test_of_a_long_accumulation_no_batch_is_taken_for_skipped(seen: Seen) -> None:  # noqa: F811
    """They are looked up before the step ends, some between a forward and its own backward."""
    assert not seen.repairs
    assert [line["indices"] for line in seen.kind("batch")] == [[i] for i in range(520)]


# errors ----------------------------------------------------------------------------------------


@scenario("""
    import warnings
    warnings.simplefilter("ignore")
    torch.autograd.set_detect_anomaly(True)
    model, optimizer = net()
    for number in range(3):
        out = model(x())
        try:
            (out * 0).sqrt().mean().backward() if number == 1 else out.mean().backward()
        except RuntimeError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
""")
def test_what_anomaly_mode_says_is_an_event_though_the_script_swallows_it(seen: Seen) -> None:  # noqa: F811
    event = seen.nonfinite
    assert (event["phase"], event["value"], event["step"], event["tensors"]) == ("backward", "nan", 2, [])
    (repair,) = seen.kind("repair")
    assert repair["code"] == "backward_raised" and "Function 'MulBackward0' returned nan" in repair["text"]


@scenario("""
    def full(grad):
        raise torch.OutOfMemoryError("no room")
    model, optimizer = net()
    for number in range(3):
        out = model(x())
        if number == 1:
            out.register_hook(full)
        try:
            out.mean().backward()
        except RuntimeError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
""")
def test_another_error_in_backward_is_told_and_is_no_event(seen: Seen) -> None:  # noqa: F811
    assert not seen.kind("nonfinite") and seen.lines[-1]["steps"] == 2
    (repair,) = seen.kind("repair")
    assert repair["text"] == "backward raised OutOfMemoryError: no room"


@limited("""
    import threading
    limit(NANBISECT_STOP="event", NANBISECT_STEPS="3")
    model, optimizer = net()
    def work():
        for number in range(3):
            loss = model(x()).square().mean()
            if number == 2:
                raise RuntimeError("no more")
            loss.backward()
            optimizer.step()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
""")
def test_a_thread_that_dies_is_heard(seen: Seen) -> None:  # noqa: F811
    """The process itself ends with code 0."""
    assert seen.code == 0 and not seen.kind("nonfinite")
    assert [line["error"] for line in seen.kind("died")] == ["RuntimeError('no more')"]
    assert (seen.lines[-1]["short"], seen.lines[-1]["unfinished"]) == (3, True)


GIVE_UP = """
    def main():
        for number in range(3):
            loss = model(x()).square().mean()
            loss = loss * NAN if number == 2 else loss
            if not loss < INF:
                {leave}
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model, optimizer = net()
    main()
"""
AT_STEP_3 = ("loss", "nan", 3, False)


def at(seen: Seen) -> tuple[str, str, int, bool]:  # noqa: F811
    """Where the one event is."""
    event = seen.nonfinite
    return event["phase"], event["value"], event["step"], event["backward"]


@scenario(GIVE_UP.format(leave="sys.exit(0)"))
def test_an_orderly_exit_with_a_nan_in_hand(seen: Seen) -> None:  # noqa: F811
    assert at(seen) == AT_STEP_3 and seen.code == 0 and seen.lines[-1]["kind"] == "exit"
    assert [line["backward"] for line in seen.kind("batch")] == [True, True, False]


@scenario(GIVE_UP.format(leave="os._exit(0)"))
def test_an_exit_that_asks_nobody(seen: Seen) -> None:  # noqa: F811
    """Neither `atexit` nor anything else runs there."""
    assert at(seen) == AT_STEP_3 and seen.code == 0 and seen.lines[-1]["kind"] == "exit"


@limited("\n    limit(NANBISECT_STOP='event', NANBISECT_STEPS='5')" + GIVE_UP.format(leave="return"))
def test_a_loss_that_is_gone_at_the_end_leaves_the_training_unfinished(seen: Seen) -> None:  # noqa: F811
    last = seen.lines[-1]
    assert not seen.kind("nonfinite") and (last["steps"], last["short"], last["unfinished"]) == (2, 5, True)


@limited("\n    limit(NANBISECT_STOP='event', NANBISECT_STEPS='3')" + GIVE_UP.format(leave="pass").replace("NAN", "1"))
def test_a_training_that_does_its_steps_is_neither_short_nor_unfinished(seen: Seen) -> None:  # noqa: F811
    last = seen.lines[-1]
    assert (last["steps"], last["short"], last["unfinished"]) == (3, 0, False)


LAST_WORD = """
import sys, torch
model = torch.nn.Linear(2, 2)
def train():
    loss = model(torch.ones(1, 2)).mean() * float("nan")
    if not loss.isfinite():
        raise FloatingPointError("loss is nan")
    loss.backward()
train()
"""


def test_an_error_raised_before_backward_still_holds_the_loss(tmp_path: Path) -> None:
    """The traceback keeps it alive until the process is gone."""
    (tmp_path / "train.py").write_text(LAST_WORD)
    done = subprocess.run(
        [sys.executable, "train.py"], env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.endswith("FloatingPointError: loss is nan\n")
    (path,) = tmp_path.glob("events.*")
    (event,) = kind(read(path), "nonfinite")
    assert (event["phase"], event["step"], event["backward"]) == ("loss", 1, False)


@limited("""
    limit(NANBISECT_STOP="event", NANBISECT_STEPS="2")
    overflowing(lambda parameters: torch.optim.SGD(parameters, lr=0.1), power=18, steps=9)
""")
def test_steps_that_a_scaler_skips_do_not_count_against_those_that_are_wanted(seen: Seen) -> None:  # noqa: F811
    """Else a healthy fp16 run would be stopped before its first step."""
    assert seen.ended == ["scaler_skip"] * 3 + ["step"] * 2 and not seen.kind("nonfinite")
    assert (seen.kind("stopped")[0]["why"], seen.lines[-1]["short"]) == ("steps", 0)


@limited("""
    limit(NANBISECT_STOP="event", NANBISECT_STEPS="2")
    model, optimizer = net(nan)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for _ in range(9):
        scaler.scale(model(x()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""")
def test_a_nan_that_a_scaler_skips_for_good_is_an_event_in_the_end(seen: Seen) -> None:  # noqa: F811
    """It takes more steps than were wanted, and fewer than it takes the scale to fall to 1."""
    assert seen.ended == ["scaler_skip"] * 5 and seen.nonfinite["step"] == 5
    assert seen.kind("stopped")[0]["why"] == "event"


# silent repairs --------------------------------------------------------------------------------


@scenario("""
    model, optimizer = net(nan)
    (model(x()).square().mean() * 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model, optimizer = net(nan)
    (model(x()).square().mean() * 0).backward()
    optimizer.step()
""")
def test_a_loss_of_zero_with_bad_gradients_is_told_of_any_script(seen: Seen) -> None:  # noqa: F811
    told = [line["text"] for line in seen.kind("repair") if line["code"] == "zero_loss_with_bad_norm"]
    assert told[0] == "the loss handed to backward was 0.0, and the gradient norm was nan"
    assert "gradients were non-finite" in told[1]


@scenario("""
    os.makedirs(os.path.join(HERE, "half", "transformers"), exist_ok=True)
    open(os.path.join(HERE, "half", "transformers", "__init__.py"), "w").close()
    with open(os.path.join(HERE, "half", "transformers", "trainer.py"), "w") as file:
        file.write("class Trainer:\\n    def log(self, logs):\\n        pass\\n")
        file.write("    def training_step(self, work):\\n        return work()\\n")
    sys.path.insert(0, os.path.join(HERE, "half"))
    from transformers.trainer import Trainer
    class Arguments:
        logging_nan_inf_filter = True
    model, optimizer = net()
    trainer = Trainer()
    trainer.args = Arguments()
    trainer.training_step(lambda: (model(x()).mean() * NAN).backward())
    optimizer.step()
""")
def test_a_filter_is_named_though_nothing_was_logged_yet(seen: Seen) -> None:  # noqa: F811
    """A cell is stopped at its first event, and a Trainer may log every 500 steps."""
    (repair,) = [line for line in seen.kind("repair") if line["code"] == "loss_filtered"]
    assert "logging_nan_inf_filter" in repair["text"] and repair["values"] == {"raw": "nan"}


# who was there ---------------------------------------------------------------------------------


@scenario("""
    model, optimizer = net()
    def ids(*rows):
        longest = max(len(row) for row in rows)
        padded = [row + [7] * (longest - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 4)
        def forward(self, input_ids, attention_mask):
            return self.embed(input_ids).mean()
    tokens = Tokens()
    for batch in (ids([1, 2, 3], [4]), ids([4]), ids([1, 2, 3])):
        tokens(**batch).backward()
    for rows in (x(), x()[:1], x()[1:]):
        model(rows).mean().backward()
""")
def test_a_record_without_a_name_is_known_by_its_content(seen: Seen) -> None:  # noqa: F811
    """In whatever batch it is, and whatever its padding."""
    contents = [line["contents"] for line in seen.kind("batch")]
    assert contents[0] == contents[2] + contents[1] and contents[3] == contents[4] + contents[5]
    assert len({mark for marks in contents for mark in marks}) == 4


def test_a_torch_that_is_too_old_is_said_and_left_alone(tmp_path: Path) -> None:
    """One line on stderr, no traceback, and a line that keeps the run from being judged."""
    package = tmp_path / "old" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1.13.1'\n")
    events = tmp_path / "events"
    events.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        env=environment(events, package.parent), capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1.13.1\n")
    assert done.stderr == "nanbisect: torch 1.13.1 is too old for the probe, which needs 2.1\n"
    (path,) = events.glob("events.*")
    (error,) = kind(read(path), "probe_error")
    assert (error["where"], "1.13.1" in error["error"]) == ("install", True)
    gone = subprocess.run(
        [sys.executable, "-c", "import torch"], env=environment(tmp_path / "gone", package.parent), capture_output=True
    )
    assert (gone.returncode, gone.stderr) == (0, b""), "nobody listens: not a word"


def test_a_python_that_trains_nothing_leaves_a_mark(tmp_path: Path) -> None:
    """So that a lost PYTHONPATH can be told from a missing torch."""
    subprocess.run([sys.executable, "-c", ""], env=environment(tmp_path), check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["reached"]
    subprocess.run([sys.executable, "-c", ""], env=environment(tmp_path / "gone"), check=True)
