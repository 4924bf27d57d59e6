"""Several ranks: where it began, who got it by reduction, whose records, and numbers that no clock decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanbisect.evidence import Effect, Ending
from nanbisect.judging import judge
from nanbisect.matrix import Cell
from nanbisect.outcome import CellResult, Outcome, Ranks, Site, Status
from nanbisect.ranks import on_ranks
from nanbisect.report.places import place_of, surfaces
from nanbisect.report.result import cell_to_result
from nanbisect.store import read_evidence
from tests import fakes

Entry = Mapping[str, Any]


def batch(step: int, *records: str, micro: int = 0) -> Entry:
    """What the probe saw of a micro-batch."""
    return {
        "kind": "batch", "time": 9.0, "step": step, "micro_batch": micro, "module": "M", "matched": "content",
        "indices": None, "records": list(records), "shapes": {}, "padding": 0, "valid_labels": 1,
    }  # fmt: skip


def step(number: int, loss: float | str, **more: Any) -> Entry:
    """A step with one loss."""
    return fakes.step_event(number, losses=[{"micro_batch": 0, "handed": loss, "unscaled": None}], **more)


def leave(
    folder: Path, *ranks: list[Entry], world: int | None = None, later: float = 0.0, asleep: int | None = None
) -> None:
    """What these ranks leave, the second `later` by its clock, one of them `asleep`."""
    folder.mkdir(exist_ok=True)
    (folder / "armed.jsonl").write_text("{}\n")
    of = len(ranks) if world is None else world
    for rank, entries in enumerate(ranks):
        head = [
            {**fakes.AWAKE, "rank": rank, "pid": 100 + rank},
            {**fakes.CHECKED, "rank": rank, "world": of, "seen": rank != asleep},
        ]
        ends = [] if entries and entries[-1]["kind"] == "exit" else [fakes.EXIT]
        moved = [{**entry, "time": entry["time"] + rank * later} for entry in [*head, *entries, *ends]]
        (folder / f"events.{rank}.{100 + rank}.jsonl").write_text(fakes.lines(*moved))


def judged(folder: Path, *ranks: list[Entry], **how: Any) -> Outcome:
    """The outcome of what these ranks left."""
    leave(folder, *ranks, **how)
    evidence = replace(read_evidence(folder), ending=Ending("exited", 0, None, 1.0, False))
    return judge(evidence, attempt=1, seed=0, effect_of=lambda resolved: Effect())


def bad(rank: int, phase: str, at: int = 2, **more: Any) -> Entry:
    """An event of a rank."""
    return fakes.nonfinite_event(rank=rank, phase=phase, step=at, **more)


def came_to_rank_0(first: str = "r4") -> tuple[list[Entry], list[Entry]]:
    """Rank 1 had it in backward of step 2, rank 0 got it by reduction."""
    tensors = fakes.nonfinite_event()["tensors"]
    census = {"first": "a", "bad": 9, "numel": 9, "parameters_bad": 3, "parameters": 3}
    zero = [batch(1, "r0"), step(1, 4.0), batch(2, first), bad(0, "reduce"), step(2, 3.0, norm="nan")]
    one = [
        *[batch(1, "r1"), step(1, 2.0), batch(2, "r5"), bad(1, "backward")],
        step(2, 5.0, norm="nan", bad=tensors, after_clip=census),
    ]
    return zero, one


@pytest.mark.parametrize("later", [0.0, 5.0, -5.0])
def test_the_rank_on_which_it_began_is_named_with_its_own_records(tmp_path: Path, later: float) -> None:
    """Whatever the clocks say: the other rank's records and losses are not those of the batch."""
    outcome = judged(tmp_path, *came_to_rank_0(), later=later)
    site = outcome.site
    assert site is not None
    assert (site.rank, site.step, site.phase, site.ranks) == (1, 2, "backward", Ranks(2, (1,), (0,)))
    assert outcome.suspects == ("r5",)
    assert outcome.records == ("r0", "r1", "r4", "r5")
    assert outcome.reason.endswith("first in b, on rank 1 of 2 (rank 0 got it by the reduction of gradients)")
    assert outcome.loss == (3.0, 4.0)
    assert site.loss == 4.0
    assert outcome.smear is not None
    assert outcome.smear.blamed == "a"
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))).site == site


def test_what_every_rank_had_by_itself_is_of_no_one_rank(tmp_path: Path) -> None:
    """Also for a repetition in which one rank was ended before it told."""
    both = judged(tmp_path, [bad(0, "loss"), step(2, "nan")], [bad(1, "loss"), step(2, "nan")], later=-3.0)
    assert both.site is not None
    assert (both.site.rank, both.site.ranks) == (0, Ranks(2, (0, 1), ()))
    assert both.reason.endswith("on both ranks, each by itself")
    again = judged(tmp_path / "again", [step(1, 1.0)], [bad(1, "loss"), step(2, "nan")])
    assert again.site is not None
    assert again.site.rank == 1
    assert again.site.same_place(both.site)
    assert not replace(again.site, rank=0, ranks=Ranks(2, (0,), ())).same_place(again.site)


def test_what_arose_in_the_reduction_itself_is_nobodys(tmp_path: Path) -> None:
    """Sums of finite gradients that overflow on the way: all records of the step are suspect."""
    zero, one = ([batch(2, f"r{rank}"), bad(rank, "reduce"), step(2, 1.0, norm="nan")] for rank in (0, 1))
    outcome = judged(tmp_path, zero, one)
    assert outcome.site is not None
    assert outcome.site.ranks == Ranks(2, (), (0, 1))
    assert "it arose in the reduction itself" in outcome.reason
    assert outcome.suspects == ("r0", "r1")


def test_the_words_for_ranks() -> None:
    """Few by number, many by how many."""

    def words(of: int, own: tuple[int, ...], got: tuple[int, ...] = (), *, brief: bool = False) -> str:
        return on_ranks(Site(1, 0, 0, "backward", "nan", ranks=Ranks(of, own, got)), brief=brief)

    assert on_ranks(Site(1, 0, 0, "backward", "nan")) == ""
    assert words(8, (3,), (0, 1, 2, 4, 5, 6, 7)) == "on rank 3 of 8 (the other 7 got it by the reduction of gradients)"
    assert words(4, (1, 3), (0, 2)) == "on ranks 1 and 3 of 4 (ranks 0 and 2 got it by the reduction of gradients)"
    assert words(4, (1,), (0,)) == "on rank 1 of 4 (rank 0 got it by the reduction of gradients)"
    assert words(4, (0, 1, 2, 3)) == "on all 4 ranks, each by itself"
    assert words(2, (), (0,)) == "on rank 0 of 2, which got it from another rank; that one left no event"
    assert words(16, tuple(range(10))) == "on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more of 16"
    assert (words(2, (1,), (0,), brief=True), words(2, (0, 1), brief=True)) == ("on rank 1 of 2", "on both ranks")


def test_the_report_and_the_result_say_the_rank(tmp_path: Path) -> None:
    """In the sentence, in the table of cells, in JSON; nothing of it for a single process."""
    outcome = judged(tmp_path, *came_to_rank_0())
    result = CellResult(Cell(4, {}), (outcome,))
    sentence = surfaces([result])
    assert "first in the gradient of b, on rank 1 of 2 (rank 0 got it by the reduction of gradients)" in sentence
    assert "while the loss is finite (4, the mean over ranks)" in sentence
    assert place_of(result).endswith("first in the gradient of b, on rank 1 of 2")
    site = cell_to_result(result)["site"]
    assert (site["rank"], site["ranks"]) == (1, {"of": 2, "by_itself": (1,), "by_reduction": (0,)})
    other = judged(tmp_path / "other", [bad(0, "backward"), step(2, 1.0)], [bad(1, "reduce"), step(2, 1.0)])
    assert "on ranks that differ between these cells" in surfaces([result, CellResult(Cell(5, {}), (other,))])
    alone = judged(tmp_path / "single", [bad(0, "backward"), step(2, 1.0)])
    assert "rank" not in surfaces([CellResult(Cell(6, {}), (alone,))])
    assert "ranks" not in cell_to_result(CellResult(Cell(6, {}), (alone,)))["site"]


def test_a_rank_that_was_not_seen_or_not_awake_makes_no_finite_cell(tmp_path: Path) -> None:
    """What it would have told is unknown."""
    assert judged(tmp_path, [step(1, 1.0)], [step(1, 2.0)]).status is Status.FINITE
    missing = judged(tmp_path / "missing", [step(1, 1.0)], world=2)
    assert missing.status is Status.FAILED
    assert "of 2 processes that train together the probe saw 1" in missing.reason
    asleep = judged(tmp_path, [step(1, 1.0)], [step(1, 1.0)], asleep=1)
    assert asleep.status is Status.FAILED
    assert "did not see the NaN that it planted" in asleep.reason


def test_a_rank_that_was_ended_after_its_last_step_has_told_all(tmp_path: Path) -> None:
    """The launcher ends it when another aborts at its exit; what is cut off before that makes no finite cell."""
    for why, forced, status in (
        ("steps", False, Status.FINITE), ("backwards", False, Status.FAILED), ("backwards", True, Status.FINITE),
    ):  # fmt: skip
        stop = {"kind": "stopped", "time": 15.0, "why": why, "steps": 1, "backwards": 1, "tries": 1, "forced": forced}
        folder = tmp_path / f"{why}-{forced}"
        leave(folder, [step(1, 1.0)], [step(1, 1.0), stop])
        one = folder / "events.1.101.jsonl"
        one.write_text("".join(line for line in one.read_text().splitlines(keepends=True) if '"exit"' not in line))
        evidence = replace(read_evidence(folder), ending=Ending("exited", 1, None, 1.0, False))
        assert judge(evidence, attempt=1, seed=0, effect_of=lambda resolved: Effect()).status is status


ABORTED = (
    "Failures:", "  rank      : 0 (local_rank: 0)", "  exitcode  : -15 (pid: 18250)  (SIGTERM)",
    "Root Cause (first observed failure):", "  exitcode  : -6 (pid: 18251)", "  traceback : Signal 6 (SIGABRT)",
)  # fmt: skip


def test_an_abort_after_the_end_is_noise_and_an_error_is_none(tmp_path: Path) -> None:
    """Under gloo a plain script aborts at exit now and then, after all was told; a rank that raised or exited with a
    code of its own is another matter."""
    raised = {"kind": "raised", "time": 19.0, "error": "FloatingPointError('mine')"}

    def ended(name: str, *more: Entry, log: tuple[str, ...] = ABORTED) -> Outcome:
        leave(tmp_path / name, [step(1, 1.0)], [step(1, 1.0), *more])
        ending = Ending("exited", 1, None, 1.0, False)
        evidence = replace(read_evidence(tmp_path / name), ending=ending, log_tail=log)
        return judge(evidence, attempt=1, seed=0, effect_of=lambda resolved: Effect())

    noise = ended("noise")
    assert (noise.status, [note.code for note in noise.doubts]) == (Status.FINITE, ["aborted_at_exit"])
    assert ended("raised", raised).status is Status.FAILED
    assert ended("code", log=(*ABORTED, "  exitcode  : 3 (pid: 1)")).status is Status.FAILED
    assert ended("other", log=("ValueError: no",)).status is Status.FAILED


def test_processes_without_a_group_are_said_to_train_apart(tmp_path: Path) -> None:
    """The launcher gave them ranks, and nobody joined them; or joined them, and all get the same batches."""
    outcome = judged(tmp_path, [step(1, 1.0)], [step(1, 1.0)], world=1)
    assert [note.code for note in outcome.doubts] == ["trained_apart"]
    assert "ranks 0 and 1 trained each for itself" in outcome.doubts[0].text
    assert not judged(tmp_path, [step(1, 1.0)], [step(1, 1.0)]).doubts
    both = [batch(1, "r0", "r1"), step(1, 1.0), batch(2, "r2"), step(2, 1.0)]
    assert "met the same records in every step" in judged(tmp_path, both, both).doubts[0].text
    assert not judged(tmp_path, both, [*both[:2], batch(2, "r3"), step(2, 1.0)]).doubts


def repair(rank_step: int, code: str = "loss_filtered") -> Entry:
    """A repair."""
    return {
        "kind": "repair",
        "time": 9.0,
        "step": rank_step,
        "code": code,
        "text": "it hid",
        "tensors": [],
        "values": {},
    }


def test_what_all_ranks_tell_is_counted_once(tmp_path: Path) -> None:
    """A step that both skipped is one step; a repair on one rank is that rank's."""
    skip = step(1, 1.0, ended="scaler_skip", taken=False, scale=65536.0)
    outcome = judged(tmp_path, [skip, step(2, 1.0)], [skip, step(2, 1.0)])
    assert outcome.doubts[0].text.startswith("the GradScaler skipped a step once, at scale 65536")
    outcome = judged(tmp_path, [repair(1), repair(2), step(2, 1.0)], [repair(1), repair(2), step(2, 1.0)])
    assert outcome.repairs[0].text == "it hid (and 1 more time)"
    outcome = judged(tmp_path, [step(2, 1.0)], [repair(1), step(2, 1.0)])
    assert outcome.repairs[0].text == "it hid, on rank 1 of 2"


def test_a_long_run_has_its_counts_and_no_loss_of_another_step(tmp_path: Path) -> None:
    """Few of its lines are written: the last one counts, and step 170 is not the 51st loss."""
    ends = {**fakes.EXIT, "repairs": {"loss_filtered": 5000}}
    entries = [step(number, float(number)) for number in range(1, 51)]
    entries += [bad(0, "backward", at=170), step(170, 7.0), repair(171), ends]
    outcome = judged(tmp_path, [*entries])
    assert outcome.repairs[0].text == "it hid (and 4999 more times)"
    assert outcome.site is not None
    assert outcome.site.loss == 7.0
    assert len(outcome.loss) == 50
