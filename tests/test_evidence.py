"""From what an attempt left to its outcome: the order in which evidence is trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nanbisect.evidence import Effect, Ending, Evidence
from nanbisect.judging import judge
from nanbisect.outcome import Outcome, Status, unwrapped
from nanbisect.ranks import of_process
from nanbisect.sightings import CUT
from nanbisect.trainers.base import PROBE
from tests import fakes

NONE: Callable[[Mapping[str, Any]], Effect] = lambda resolved: Effect()  # noqa: E731
OK = Ending("exited", 0, None, 3.0, False)


def evidence(files: Mapping[str, str], ending: Ending = OK, log: tuple[str, ...] = ()) -> Evidence:
    """Evidence as the store reads it."""

    def read(name: str) -> tuple[dict[str, Any], ...]:
        return tuple(json.loads(line) for line in files.get(name, "").splitlines())

    processes = [of_process(read(name)) for name in sorted(files) if name.startswith("events.")]
    probe = sorted((line for lines in processes for line in lines), key=lambda line: line["time"])
    return Evidence(ending, tuple(probe), read("trainer.jsonl"), "armed.jsonl" in files, log_tail=log)


def judged(
    files: Mapping[str, str], ending: Ending = OK, effect: str | None = None, log: tuple[str, ...] = ()
) -> Outcome:
    """The outcome, with or without a setting that did not take effect."""
    return judge(evidence(files, ending, log), attempt=2, seed=7, effect_of=lambda resolved: Effect(effect))


def without(files: Mapping[str, str], name: str) -> dict[str, str]:
    """The files less one."""
    return {key: text for key, text in files.items() if key != name}


def end(how: str | None, **more: Any) -> str:
    """A diary that ends so after one step."""
    return fakes.diary(fakes.STEP, how=how, **more)


def test_a_healthy_attempt_is_finite_with_its_numbers() -> None:
    """Losses, norms, channels, records and times are carried over."""
    outcome = judged(fakes.finite_files())
    assert (outcome.status, outcome.attempt, outcome.seed) == (Status.FINITE, 2, 7)
    assert outcome.loss == (2.5, 2.5)
    assert outcome.grad_norm == (1.25, 1.25)
    assert outcome.channels == {"text": (2.5, 10.0)}
    assert outcome.records == ("r1", "r2")
    assert outcome.first_gradients == {"a": 1.0}
    assert (outcome.load_seconds, outcome.train_seconds) == (0.0, 8.0)


def test_a_recorded_event_gives_the_site_the_smear_and_the_suspects() -> None:
    """What a check after clipping would have blamed stands beside what arrived first."""
    outcome = judged(fakes.nonfinite_files())
    assert outcome.status is Status.NONFINITE
    assert outcome.site is not None
    assert (outcome.site.step, outcome.site.phase, outcome.site.kind, outcome.site.parameters) == (
        1,
        "backward",
        "nan",
        ("b",),
    )
    assert outcome.smear is not None
    assert outcome.smear.misleads
    assert (outcome.smear.blamed, outcome.smear.first) == ("a", "b")
    assert outcome.suspects == ("r1",)
    assert math.isnan(outcome.grad_norm[0])


@pytest.mark.parametrize(
    "ending",
    [
        Ending("exited", 1, None, 1.0, False),
        Ending("exited", None, 9, 1.0, True),
        Ending("timed_out", None, 15, 1.0, False),
        Ending("cancelled", None, 15, 1.0, False),
        Ending("lost", None, None, 1.0, False),
        Ending("driver_died", None, None, 1.0, False),
    ],
)
def test_a_recorded_event_stands_whatever_happened_next(ending: Ending) -> None:
    """A crash after the NaN does not hide it."""
    assert judged(fakes.nonfinite_files(), ending).status is Status.NONFINITE


@pytest.mark.parametrize(
    ("ending", "how", "status"),
    [
        (Ending("timed_out", None, 15, 9.0, False), None, Status.TIMED_OUT),
        (Ending("cancelled", 0, None, 9.0, False), "done", Status.KILLED),
        (Ending("driver_died", None, 9, 9.0, False), None, Status.KILLED),
        (Ending("lost", None, None, 9.0, False), None, Status.KILLED),
        (Ending("exited", None, 9, 9.0, True), None, Status.OUT_OF_MEMORY),
        (Ending("exited", None, 9, 9.0, False), None, Status.KILLED),
        (Ending("exited", None, 11, 9.0, False), None, Status.FAILED),
        (Ending("exited", None, 6, 9.0, False), None, Status.FAILED),
        (Ending("exited", 1, None, 9.0, False), None, Status.FAILED),
        (Ending("exited", 0, None, 9.0, False), None, Status.FAILED),
        (Ending("exited", 1, None, 9.0, False), "error", Status.FAILED),
        (Ending("exited", 1, None, 9.0, False), "out_of_memory", Status.OUT_OF_MEMORY),
        (Ending("exited", 0, None, 9.0, False), "bad_input", Status.FAILED),
        (Ending("exited", 0, None, 9.0, False), "unsupported", Status.UNSUPPORTED),
    ],
)
def test_without_an_event_only_an_orderly_end_is_finite(ending: Ending, how: str | None, status: Status) -> None:
    """Stopped, killed, crashed and silent processes are not judged, each under its own name."""
    files = {**fakes.finite_files(), "trainer.jsonl": end(how, text="why")}
    assert judged(files, ending).status is status


def test_a_crash_names_the_signal_and_a_silent_exit_the_last_line() -> None:
    """The reason is something to act on."""
    files = {**fakes.finite_files(), "trainer.jsonl": end(None)}
    assert "SIGSEGV" in judged(files, Ending("exited", None, 11, 1.0, False)).reason
    outcome = judged(files, Ending("exited", 2, None, 1.0, False), log=("", "ValueError: no such file"))
    assert outcome.reason.endswith("with code 2 before it was done; its log ends with: ValueError: no such file")
    assert outcome.log_tail[-1] == "ValueError: no such file"


def test_finite_needs_a_probe_that_was_there_and_awake() -> None:
    """No armed line, no backward, no planted NaN seen, an error of the probe: each is not judged."""
    healthy = fakes.finite_files()
    assert judged(without(healthy, "armed.jsonl")).status is Status.NO_TRAINING
    no_steps = {**healthy, "events.0.1.jsonl": fakes.lines(fakes.AWAKE)}
    assert judged(no_steps).status is Status.NO_TRAINING
    blind = {
        **healthy,
        "events.0.1.jsonl": fakes.lines(fakes.AWAKE, {**fakes.CHECKED, "seen": False}, fakes.step_event()),
    }
    assert judged(blind).status is Status.FAILED
    unchecked = {**healthy, "events.0.1.jsonl": fakes.lines(fakes.AWAKE, fakes.step_event())}
    assert judged(unchecked).status is Status.FAILED
    error = {"kind": "probe_error", "time": 3.0, "where": "backward", "error": "KeyError('x')"}
    broken = {**healthy, "events.0.1.jsonl": fakes.lines(fakes.AWAKE, fakes.CHECKED, error, fakes.step_event())}
    assert judged(broken).status is Status.FAILED


def test_a_setting_without_effect_is_not_judged_either_way() -> None:
    """The cell is not what it claims to be, so neither a NaN nor its absence counts."""
    for files in (fakes.finite_files(), fakes.nonfinite_files()):
        outcome = judged(files, effect="attention=eager was asked for, and the graph shows sdpa")
        assert outcome.status is Status.UNSUPPORTED
        assert "did not take effect" in outcome.reason
        assert outcome.site is None


def test_lost_events_are_never_finite_and_never_hide_a_finding() -> None:
    """A full disk swallows lines; what was written still counts."""
    assert (
        judge(replace(evidence(fakes.finite_files()), lost=True), attempt=1, seed=0, effect_of=NONE).status
        is Status.FAILED
    )
    assert (
        judge(replace(evidence(fakes.nonfinite_files()), lost=True), attempt=1, seed=0, effect_of=NONE).status
        is Status.NONFINITE
    )
    fewer = {**fakes.finite_files(), "events.0.1.jsonl": fakes.lines(fakes.AWAKE, fakes.CHECKED, fakes.step_event())}
    assert judged(fewer).status is Status.FAILED


def test_a_command_without_a_diary_is_judged_by_the_probe_alone() -> None:
    """Its exit code counts, unless the probe had stopped it; its records come from the probe's batches."""
    batch = fakes.batch_event(1, indices=[4, 7])
    events = [fakes.AWAKE, fakes.CHECKED, batch, fakes.step_event(1), fakes.EXIT]
    files = {"armed.jsonl": "{}", "events.0.1.jsonl": fakes.lines(*events)}
    outcome = judged(files)
    assert (outcome.status, outcome.records, outcome.loss) == (Status.FINITE, ("row 4", "row 7"), (2.5,))
    failed = judged(files, Ending("exited", 1, None, 1.0, False), log=("no such option",))
    assert failed.status is Status.FAILED
    assert failed.reason == "the training exited with code 1; its log ends with: no such option"
    assert judged(files, Ending("exited", None, 6, 1.0, False)).status is Status.FAILED
    stopped = {"kind": "stopped", "time": 9.5, "why": "steps", "steps": 1, "backwards": 1, "tries": 1, "forced": False}
    told = {**files, "events.0.1.jsonl": fakes.lines(*events[:-1], stopped, fakes.EXIT)}
    assert judged(told, Ending("exited", None, 6, 1.0, False)).status is Status.FINITE
    cut = {**files, "events.0.1.jsonl": fakes.lines(*events[:-1])}
    assert judged(cut).status is Status.FAILED
    partial = {"kind": "partial", "time": 3.0, "reason": "DeepSpeed ZeRO stage 3"}
    hidden = {**files, "events.0.1.jsonl": fakes.lines(*events[:2], partial, *events[2:])}
    assert "ZeRO" in judged(hidden).reason
    assert judged(hidden).status is Status.FAILED


def test_a_batch_without_ids_or_with_a_cut_list_leaves_records_unknown() -> None:
    """What is not known to have been met may have been met."""
    batch = {
        "kind": "batch", "time": 9.0, "step": 1, "micro_batch": 0, "rank": 0, "module": "M", "matched": "content",
        "indices": [4], "records": ["r4"], "shapes": {}, "padding": None, "valid_labels": None,
    }  # fmt: skip
    lost = {**batch, "micro_batch": 1, "indices": None, "records": None}
    cut = {**batch, "micro_batch": 1, "records": [f"r{number}" for number in range(CUT)]}
    for second, known in ((batch, True), (lost, False), (cut, False)):
        events = fakes.lines(fakes.AWAKE, fakes.CHECKED, batch, second, fakes.step_event(1), fakes.EXIT)
        outcome = judged({"armed.jsonl": "{}", "events.0.1.jsonl": events})
        assert (outcome.records[0], outcome.all_records) == ("r4", known)
        assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    inputs = (PROBE / "inputs.py").read_text(encoding="utf-8")
    assert f"LISTED = {CUT}  #" in inputs


def test_names_are_the_models_own_whatever_wraps_it() -> None:
    """Cells with and without checkpointing, or with another number of processes, name the same parameters."""
    name = "module.layers.1._checkpoint_wrapped_module.q.weight"
    tensor = {**fakes.nonfinite_event()["tensors"][0], "name": name}
    census = {"first": "module.embed.weight", "bad": 9, "numel": 9, "parameters_bad": 3, "parameters": 3}
    step = fakes.step_event(1, bad=[tensor], after_clip=census, gradient_norms={name: 1.0, "_orig_mod.a": 2.0})
    events = fakes.lines(fakes.AWAKE, fakes.CHECKED, fakes.nonfinite_event(tensors=[tensor]), step)
    outcome = judged({"armed.jsonl": "{}", "events.0.1.jsonl": events})
    assert outcome.site is not None and outcome.smear is not None
    assert outcome.site.parameters == ("layers.1.q.weight",)
    assert outcome.first_gradients == {"layers.1.q.weight": 1.0, "a": 2.0}
    assert (outcome.smear.blamed, outcome.smear.first) == ("module.embed.weight", "layers.1.q.weight")
    assert replace(outcome.smear, blamed=name).misleads is False
    assert outcome.reason.endswith("first in layers.1.q.weight")
    assert unwrapped("my_module.module.weight") == "my_module.module.weight"


def test_what_happened_on_several_ranks_is_told_of_the_rank_that_saw_it() -> None:
    """The batch of another rank is no suspect; a step that all ranks dropped was dropped once."""
    batch = {
        "kind": "batch", "time": 9.0, "step": 1, "micro_batch": 0, "rank": 0, "module": "M", "matched": "content",
        "indices": None, "records": ["r0"], "contents": None, "shapes": {}, "backward": True, "padding": None,
        "valid_labels": None,
    }  # fmt: skip
    other = {**batch, "rank": 1, "records": ["r1"]}
    dropped: list[Mapping[str, Any]] = [
        {"kind": "repair", "time": 11.0, "step": step, "code": "dropped_step", "text": f"step {step}", "tensors": []}
        for step in (1, 2)
    ]
    first = fakes.lines(fakes.AWAKE, {**fakes.CHECKED, "world": 2}, batch, *dropped)
    start = ({**fakes.AWAKE, "rank": 1}, {**fakes.CHECKED, "rank": 1, "world": 2})

    def both(**event: Any) -> Outcome:
        second = (*start, other, fakes.nonfinite_event(rank=1, **event), *dropped)
        return judged({"armed.jsonl": "{}", "events.0.1.jsonl": first, "events.1.2.jsonl": fakes.lines(*second)})

    assert both().suspects == ("r1",)
    assert [note.text for note in both().repairs] == ["step 1 (and 1 more time)"]
    assert both(phase="reduce").suspects == ("r0", "r1")
    other = {**other, "backward": False}
    skipped = both(phase="loss", backward=False, tensors=[])
    assert (skipped.suspects, skipped.records) == (("r1",), ("r0",))
    assert skipped.reason == (
        "nan in loss of step 1, micro-batch 0, on rank 1 of 2, which the script did not hand to backward"
    )


def test_dtypes_and_casts_are_resolved_from_what_the_probe_saw() -> None:
    """Of the largest root: parts of it may be roots, too."""
    root = {
        "kind": "root", "time": 3.0, "module": "M", "parameters": 64, "elements": 9, "dtypes": {"float32": 64},
        "device": "cpu", "dropout": False, "tied": [],
    }  # fmt: skip
    part = {**root, "parameters": 1, "dtypes": {"bfloat16": 1}}
    events = fakes.lines(fakes.AWAKE, fakes.CHECKED, root, part, fakes.step_event(1, casts=0), fakes.EXIT)
    resolved = judged({"armed.jsonl": "{}", "events.0.1.jsonl": events}).resolved
    assert (resolved["parameter_dtypes"], resolved["casts"], resolved["device"]) == ({"float32": 64}, 0, "cpu")


def test_state_found_late_suspects_all_steps_since_it_was_looked_at() -> None:
    """A long run looks at optimizer state now and then: neither the step nor its batch is then certain."""
    tensor = {**fakes.nonfinite_event()["tensors"][0], "name": "b.exp_avg_sq", "value": "+inf"}
    event = fakes.nonfinite_event(step=4, since=2, phase="optimizer", value="+inf", tensors=[tensor])
    batches = [fakes.batch_event(step, records=[f"r{step}"]) for step in range(1, 6)]
    lines = fakes.lines(fakes.AWAKE, fakes.CHECKED, *batches, event, fakes.step_event(4), fakes.EXIT)
    outcome = judged({"armed.jsonl": "x", "events.0.1.jsonl": lines})
    assert outcome.suspects == ("r3", "r4")
    assert "+inf in optimizer of one of steps 3 to 4, first in b.exp_avg_sq" in outcome.reason


def test_state_that_was_gone_at_the_end_is_not_called_finite() -> None:
    """What nobody looked at any more is named."""
    files = fakes.finite_files()
    events = files["events.0.1.jsonl"].replace('"unseen_since": null', '"unseen_since": 70')
    outcome = judged({**files, "events.0.1.jsonl": events})
    assert outcome.status is Status.FINITE
    assert outcome.reason.endswith("(optimizer state up to step 70, when it was looked at last)")


def test_a_scaler_that_skips_every_step_leaves_nothing_to_judge() -> None:
    """No step was taken, so finite would be a guess."""
    skipped = {**fakes.STEP, "taken": False}
    assert judged({**fakes.finite_files(), "trainer.jsonl": fakes.diary(skipped, skipped)}).status is Status.FAILED


def test_absorbed_overflows_are_a_doubt_not_a_finding() -> None:
    """Skipped steps under a GradScaler leave the cell finite, with the scales."""
    skip = fakes.step_event(1, taken=False, ended="scaler_skip", scale=65536.0, bad=[{"name": "a"}], norm="+inf")
    events = fakes.lines(fakes.AWAKE, fakes.CHECKED, skip, fakes.step_event(2, scale=32768.0), fakes.EXIT)
    outcome = judged({**fakes.finite_files(), "events.0.1.jsonl": events})
    assert outcome.status is Status.FINITE
    assert [doubt.code for doubt in outcome.doubts] == ["scaler_skip"]
    assert "65536" in outcome.doubts[0].text


def test_repairs_are_counted_by_code() -> None:
    """Each silent repair is one line, with how often it happened."""
    repair = {
        "kind": "repair",
        "time": 3.0,
        "step": 1,
        "code": "gradients_repaired",
        "text": "2 gradients",
        "tensors": [],
    }
    events = fakes.lines(fakes.AWAKE, fakes.CHECKED, repair, repair, fakes.step_event())
    outcome = judged({**fakes.finite_files(), "events.0.1.jsonl": events})
    assert [(note.code, note.text) for note in outcome.repairs] == [
        ("gradients_repaired", "2 gradients (and 1 more time)")
    ]


def test_a_loss_event_names_its_channels() -> None:
    """Which channel's own loss was non-finite comes from the trainer."""
    step = {**fakes.STEP, "channels": [{"text": [25.0, 10.0], "codebook7": ["nan", 4.0]}], "losses": ["nan"]}
    events = fakes.lines(
        fakes.AWAKE, fakes.CHECKED, fakes.nonfinite_event(phase="loss", tensors=[]), fakes.step_event()
    )
    outcome = judged(
        {**fakes.nonfinite_files(), "events.0.1.jsonl": events, "trainer.jsonl": fakes.diary(step, how="stopped")}
    )
    assert outcome.site is not None
    assert outcome.site.channels == ("codebook7",)


def test_the_first_event_by_step_wins() -> None:
    """A later event, or one of a slower rank, does not move the site."""
    late = fakes.nonfinite_event(step=2, time=5.0, phase="optimizer")
    events = fakes.lines(fakes.AWAKE, fakes.CHECKED, late, fakes.nonfinite_event(rank=1, time=9.0), fakes.step_event())
    outcome = judged({**fakes.nonfinite_files(), "events.0.1.jsonl": events})
    assert outcome.site is not None
    assert (outcome.site.step, outcome.site.rank) == (1, 1)


def test_outcomes_survive_their_json() -> None:
    """What is read back equals what was written, NaN included."""
    for files in (fakes.finite_files(), fakes.nonfinite_files()):
        outcome = judged(files)
        text = json.dumps(outcome.to_json(), allow_nan=False)
        again = Outcome.from_json(json.loads(text))
        assert json.dumps(again.to_json(), allow_nan=False) == text
        assert again.site == outcome.site
