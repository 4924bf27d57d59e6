"""Was the probe there, and did the training go as far as it was asked to? From what the processes left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nanbisect.evidence import Ending, Evidence
from nanbisect.judging import judge
from nanbisect.outcome import Outcome, Status
from tests import fakes
from tests.test_evidence import NONE

Line = Mapping[str, Any]
OK = Ending("exited", 0, None, 3.0, False)
SEEN = (fakes.AWAKE, fakes.CHECKED, fakes.step_event(1), fakes.step_event(2))


def judged(*lines: Line, ending: Ending = OK, reached: bool = True, armed: bool = True) -> Outcome:
    """The outcome of a command that left these lines."""
    found = Evidence(ending, tuple(lines), (), armed, reached=reached)
    return judge(found, attempt=1, seed=0, effect_of=NONE)


def exit_line(**changed: Any) -> Line:
    return {**fakes.EXIT, **changed}


@pytest.mark.parametrize(
    ("reached", "armed", "words"),
    [
        (False, False, "the probe was not there: no Python process of the command read PYTHONPATH"),
        (True, False, "no Python process that has the probe imported torch"),
        (True, True, "the probe saw no backward pass"),
    ],
)
def test_three_ways_to_see_nothing(reached: bool, armed: bool, words: str) -> None:
    """Each is said, also beside an exit code that says the rest; none of them is a judgement."""
    outcome = judged(reached=reached, armed=armed)
    assert outcome.status is Status.NO_TRAINING
    assert outcome.reason.startswith(words)
    failed = judged(reached=reached, armed=armed, ending=replace(OK, code=3))
    assert failed.status is Status.FAILED
    assert "exited with code 3" in failed.reason
    assert (words in failed.reason) == (not armed)


def test_a_probe_that_was_not_installed_says_why() -> None:
    """An old torch looks like a training without a backward pass."""
    error = {"kind": "probe_error", "time": 2.0, "where": "install", "error": "torch 1.13.1 is too old, it needs 2.1"}
    outcome = judged(fakes.AWAKE, error)
    assert (outcome.status, "torch 1.13.1 is too old" in outcome.reason) == (Status.FAILED, True)


def test_what_is_left_in_the_background_is_not_judged_unless_it_was_seen_to_the_end() -> None:
    """A data loader's worker that lingers is no reason to doubt a training that wrote its last line."""
    left = replace(OK, stragglers=2)
    assert "in the background" in judged(ending=left, reached=False, armed=False).reason
    assert "in the background" in judged(*SEEN, ending=left).reason
    assert judged(*SEEN, exit_line(), ending=left).status is Status.FINITE
    bad = fakes.nonfinite_event()
    assert judged(*SEEN, bad, ending=left).status is Status.NONFINITE


def test_a_training_that_ends_by_itself_says_how_far_it_went() -> None:
    """A doubt, which attribution reads; not where nanbisect stopped it, nor where one rank went on."""
    outcome = judged(*SEEN, exit_line(short=24))
    assert [(note.code, note.text) for note in outcome.doubts] == [
        ("fewer_steps", "the command ended by itself after 2 of 24 optimizer steps")
    ]
    stopped = {"kind": "stopped", "time": 9.5, "why": "steps", "steps": 2, "backwards": 2, "tries": 1, "forced": False}
    assert judged(*SEEN, stopped, exit_line(short=24)).doubts == ()
    assert judged(*SEEN, exit_line(short=24), exit_line()).doubts == ()
    assert judged(*SEEN, exit_line(short=24), exit_line(backwards=0, steps=0)).doubts != ()
    assert judged(*SEEN, fakes.nonfinite_event(), exit_line(short=24)).doubts == ()


def test_a_forward_that_came_to_nothing_at_the_end() -> None:
    """With steps left to do it may have been the NaN; without a wanted number it is a doubt."""
    outcome = judged(*SEEN, exit_line(short=3, unfinished=True))
    assert (outcome.status, "2 of 3 optimizer steps" in outcome.reason) == (Status.FAILED, True)
    outcome = judged(*SEEN, exit_line(unfinished=True))
    assert (outcome.status, [note.code for note in outcome.doubts]) == (Status.FINITE, ["unfinished"])


def test_a_thread_that_died_is_not_judged() -> None:
    """The process ends with code 0 all the same."""
    died = {"kind": "died", "time": 9.0, "thread": "Thread-1", "error": "RuntimeError('no more')"}
    outcome = judged(*SEEN, died, exit_line())
    assert (outcome.status, "RuntimeError('no more')" in outcome.reason) == (Status.FAILED, True)
    assert judged(*SEEN, died, fakes.nonfinite_event(), exit_line()).status is Status.NONFINITE


def test_a_scaler_that_skips_to_the_end_is_not_judged() -> None:
    """Whether it overflows or is NaN shows only when a step is taken again."""
    skip = fakes.step_event(3, taken=False, ended="scaler_skip", scale=16384.0, norm="+inf")
    outcome = judged(*SEEN, skip, exit_line())
    assert (outcome.status, "skipped the last step, at scale 16384" in outcome.reason) == (Status.FAILED, True)
    settled = judged(*SEEN, skip, fakes.step_event(4), fakes.step_event(5, taken=False, ended="exit"), exit_line())
    assert (settled.status, [note.code for note in settled.doubts]) == (Status.FINITE, ["scaler_skip"])


def test_a_batch_that_was_skipped_is_not_one_that_was_trained_on() -> None:
    """It is the suspect, and no record of a finite cell."""
    batch = {
        "kind": "batch", "time": 9.0, "step": 1, "micro_batch": 0, "module": "M", "matched": "content",
        "indices": [4], "records": None, "contents": None, "shapes": {}, "backward": True, "padding": None,
        "valid_labels": None,
    }  # fmt: skip
    skipped = {**batch, "indices": [7], "backward": False}
    event = fakes.nonfinite_event(phase="loss", tensors=[], backward=False)
    outcome = judged(*SEEN, batch, skipped, event, exit_line())
    assert (outcome.records, outcome.suspects) == (("row 4",), ("row 7",))
    assert outcome.reason == "nan in loss of step 1, micro-batch 0, which the script did not hand to backward"
    nameless = {**batch, "indices": None, "contents": ["00ff", "0a0b"]}
    outcome = judged(*SEEN, nameless, fakes.nonfinite_event(), exit_line())
    assert outcome.records == outcome.suspects == ("content 00ff", "content 0a0b")
    assert outcome.named_suspects == ()
