"""What a report says, cell by cell made by hand; that its Markdown is inert and fits; the machine-readable result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from nanbisect.attribution import Attribution, Cause, Caution, Divergence, Finding, Standing, attribute
from nanbisect.matrix import Cell, Expansion, Factor, Matrix, expand
from nanbisect.matrix_command import settings_of
from nanbisect.outcome import CellResult, Note, Outcome, Site, Smear, Status
from nanbisect.report.escape import rendered
from nanbisect.report.grid import build_grid
from nanbisect.report.markdown import to_markdown
from nanbisect.report.model import Report, RunInputs, build
from nanbisect.report.redact import Redactor
from nanbisect.report.result import to_result
from nanbisect.report.words import clip, combination, figure
from nanbisect.trainers.registry import VOCABULARIES

DEMO = Matrix(
    name="demo",
    trainer="sft",
    recipe="demo/tts.py",
    settings={"precision": "bf16", "learning_rate": "1e-3"},
    factors=(
        Factor("gradient_checkpointing", ("off", "on")),
        Factor("batch_size", ("1", "2", "8")),
        Factor("channel_weights", ("1,8", "1,32")),
        Factor("attention", ("sdpa", "eager", "flash")),
    ),
)
NEUTRAL = frozenset({"attention", "gradient_checkpointing", "batch_size"})
ENVIRONMENT: Mapping[str, Any] = {
    "device": "cpu",
    "python": "3.11.2",
    "torch": "2.13.0",
    "cuda": None,
    "packages": {"transformers": "4.57.1", "accelerate": "1.12.0"},
    "gpus": [],
    "nanbisect": "0.1.0",
}
K_PROJ = "decoder.layers.1.k_proj.weight"
SITE = Site(1, 0, 0, "backward", "nan", (K_PROJ, "decoder.layers.1.q_proj.weight"))
BAD = Outcome(
    Status.NONFINITE,
    f"nan in backward of step 1, micro-batch 0, first in {K_PROJ}",
    site=SITE,
    smear=Smear("embed_tokens.weight", 16576, 16576, K_PROJ),
    loss=(3.789,),
    grad_norm=(math.nan,),
    records=("utt01", "utt02"),
    suspects=("utt02",),
    seconds=1.9,
)
GOOD = Outcome(
    Status.FINITE, "finite", loss=(3.789, 3.5, 3.1), grad_norm=(1.25, 1.0, 0.9), records=("utt01", "utt02"), seconds=2.2
)
NO_FLASH = Outcome(Status.UNSUPPORTED, "flash_attn is not installed", blocked={"attention": "flash"})
Judge = Callable[[Mapping[str, str]], Outcome | None]


def demo(levels: Mapping[str, str]) -> Outcome:
    """The demo: 8 of 36 cells fail, 12 can't be judged."""
    if levels["attention"] == "flash":
        return NO_FLASH
    return BAD if levels["attention"] == "eager" and levels["batch_size"] != "1" else GOOD


def inputs_of(judge: Judge = demo, matrix: Matrix = DEMO, **others: Any) -> RunInputs:
    """A run of every cell of a matrix."""
    results = tuple(CellResult(cell, (outcome,) if (outcome := judge(cell.levels)) else ()) for cell in expand(matrix))
    given_: dict[str, Any] = {
        "attribution": attribute(matrix.factors, results, neutral_settings=NEUTRAL),
        "environment": ENVIRONMENT,
        "folder": "demo-20251130-170000",
        "command": ("nanbisect", "run", "matrices/demo.yaml"),
        "matrix_path": "matrices/demo.yaml",
        "vocabulary": VOCABULARIES["sft"],
    }
    return RunInputs(matrix=matrix, results=results, **{**given_, **others})


def report_of(judge: Judge = demo, matrix: Matrix = DEMO, **others: Any) -> Report:
    return build(inputs_of(judge, matrix, **others))


def cause(levels: Mapping[str, tuple[str, ...]], standing: Standing = Standing.PROVED, **others: Any) -> Cause:
    given_: dict[str, Any] = {"matching": 8, "failed": 8, "untested": 0, "needed": {}}
    return Cause(levels, standing, **{**given_, **others})


def attribution(finding: Finding, *causes: Cause, **others: Any) -> Attribution:
    given_: dict[str, Any] = {"neutral": (), "divergences": (), "compared": 0, "cautions": ()}
    return Attribution(finding, causes, **{**given_, **others})


def everything(outcome: Outcome | None) -> Judge:
    return lambda levels: outcome


# the verdict


def test_the_demo_reads_as_two_sentences() -> None:
    assert report_of().verdict == (
        "`attention=eager` together with `batch_size` 2 or 8 brings the NaN: 8 of 8 matching cells failed, and "
        "changing either part alone ends it. It surfaces in backward of step 1, first in the gradient of "
        "decoder.layers.1.k_proj.weight, while the loss is finite (3.789)."
    )


def test_the_scope_counts_cells_and_names_the_device() -> None:
    report = report_of(excluded=3)
    assert report.scope == (
        "24 of 36 cells were judged on cpu: 16 finite, 8 non-finite; 12 unsupported. "
        "The matrix excludes 3 more combinations."
    )
    assert report.counts == {"finite": 16, "nonfinite": 8, "unsupported": 12}


def test_a_supported_cause_says_what_was_not_judged() -> None:
    unjudged = cause({"attention": ("eager",)}, Standing.SUPPORTED, matching=12, failed=11, untested=1)
    text = report_of(attribution=attribution(Finding.CAUSE, unjudged)).verdict
    assert text.startswith(
        "`attention=eager` brings the NaN in every cell that was judged: 11 of 11 judged matching cells failed, and "
        "changing it ends it; 1 matching cell was not judged. "
    )


@pytest.mark.parametrize(("seen", "end"), [("finite", "ends it"), ("mixed", "can end it"), ("nonfinite", "can end it")])
def test_an_end_is_claimed_only_where_it_was_always_seen(seen: str, end: str) -> None:
    needed = {"a": {"1": "finite"}, "b": {"1": seen, "3": "unsupported"}, "c": {"0": "finite"}}
    three = cause({"a": ("2",), "b": ("2",), "c": ("1",)}, needed=needed)
    text = report_of(attribution=attribution(Finding.CAUSE, three)).verdict
    assert text.startswith("`a=2` together with `b=2` and `c=1` brings the ")
    assert f"changing any one part alone {end}." in text


def test_several_causes_stand_side_by_side() -> None:
    def judge(levels: Mapping[str, str]) -> Outcome:
        return BAD if levels["attention"] == "eager" or levels["batch_size"] == "8" else GOOD

    text = report_of(judge).verdict
    assert "brings the NaN, and so does " in text
    assert "`batch_size=8` (12 of 12 matching cells failed)" in text
    assert "`attention=eager` (12 of 12 matching cells failed)" in text


def test_failures_that_no_cause_explains_are_counted() -> None:
    one = cause({"attention": ("eager",), "batch_size": ("8",)}, matching=4, failed=4)
    text = report_of(attribution=attribution(Finding.CAUSE, one)).verdict
    assert text.endswith("The judged cells do not say what brings the other 4 failures.")


def test_an_inf_is_called_inf() -> None:
    inf = replace(BAD, site=replace(SITE, kind="-inf"))
    text = report_of(lambda levels: inf if demo(levels) is BAD else demo(levels)).verdict
    assert "brings the Inf: 8 of 8" in text


LOSS = replace(SITE, phase="loss", parameters=())
CLIP = replace(SITE, phase="clip", parameters=())
OPTIMIZER = replace(SITE, phase="optimizer", step=2)


@pytest.mark.parametrize(
    ("site", "loss", "text"),
    [
        (LOSS, (math.nan,), "in the loss of step 1."),
        (replace(LOSS, channels=("audio3",)), (math.inf,), "in the loss of step 1, in channel audio3."),
        (CLIP, (2.5,), "in clipping of step 1, in the norm handed to it, while the loss is finite (2.5)."),
        (OPTIMIZER, (3.0, 2.25), f"the optimizer of step 2, first in {K_PROJ}, while the loss is finite (2.25)."),
        (replace(SITE, phase="load"), (), f"right after load, before the first step, first in {K_PROJ}."),
        (SITE, (math.nan,), f"the gradient of {K_PROJ}, and the loss is non-finite too."),
        (SITE, (), f"first in the gradient of {K_PROJ}."),
    ],
)
def test_where_it_surfaced_is_said_for_every_phase(site: Site, loss: tuple[float, ...], text: str) -> None:
    bad = replace(BAD, site=site, loss=loss)
    verdict = report_of(lambda levels: bad if demo(levels) is BAD else demo(levels)).verdict
    assert verdict.endswith(text)


def test_places_that_differ_are_counted_and_losses_get_a_range() -> None:
    def judge(levels: Mapping[str, str]) -> Outcome:
        outcome = demo(levels)
        if outcome is BAD and levels["batch_size"] == "8" and levels["channel_weights"] == "1,32":
            return replace(BAD, site=replace(SITE, phase="loss", parameters=()), loss=(math.nan,))
        return replace(outcome, loss=(4.0125,)) if levels["channel_weights"] == "1,32" else outcome

    report = report_of(judge)
    assert "In 6 of 8 failing cells it surfaces in backward of step 1" in report.verdict
    assert "while the loss is finite (3.789 to 4.013)." in report.verdict or "(3.789 to 4.012)." in report.verdict
    assert [len(place.cells) for place in report.places] == [6, 2]


def test_an_origin_found_by_a_trace_is_named() -> None:
    origin = {"phase": "forward", "module": "decoder.layers.0", "operation": "aten._softmax", "source": "tts.py:41"}
    report = report_of(lambda levels: replace(BAD, origin=origin) if demo(levels) is BAD else demo(levels))
    assert report.verdict.endswith(
        "A trace finds its origin in forward: `aten._softmax` in `decoder.layers.0` (tts.py:41)."
    )


def test_what_is_not_told_apart_is_listed_with_the_cells_that_decide() -> None:
    rivals = cause(
        {"attention": ("eager",)}, Standing.NOT_TOLD_APART, alternatives=({"batch_size": ("8",)},), deciding=(6, 9)
    )
    report = report_of(attribution=attribution(Finding.UNDECIDED, rivals))
    assert report.verdict.startswith(
        "Some cells fail (8 of 24 judged), but the judged cells do not tell apart: `attention=eager`; `batch_size=8`. "
        "Cells 6 and 9 would decide."
    )
    assert [step.command for step in report.next_steps[:2]] == [
        "nanbisect rerun demo-20251130-170000 6",
        "nanbisect rerun demo-20251130-170000 9",
    ]


def test_nothing_failed_is_not_reproduced_and_says_what_to_try() -> None:
    report = report_of(lambda levels: NO_FLASH if levels["attention"] == "flash" else GOOD)
    assert report.verdict == (
        "The NaN was not reproduced: none of 24 judged cells became non-finite in 3 optimizer steps over 2 records, on "
        "cpu; 12 cells were not judged. Next, try more steps (`--steps`), more or other records, the data order of the "
        "run that failed, and factors that this matrix does not vary (`precision`)."
    )
    commands = [step.command for step in report.next_steps]
    assert commands[:2] == [
        "nanbisect run matrices/demo.yaml --steps 30",
        "nanbisect run matrices/demo.yaml --factor 'precision=bf16|fp32'",
    ]
    assert "(`records` and `skip_records` in the matrix)" in str(report.next_steps[2])


def test_a_command_is_not_told_of_keys_that_it_cannot_obey() -> None:
    """Its data are its own affair, and so is the number of its processes."""
    matrix = replace(DEMO, trainer="command", command=("python", "train.py"))
    told = report_of(everything(GOOD), matrix, vocabulary=VOCABULARIES["command"])
    text = " ".join(map(str, told.next_steps))
    assert (
        "Give the command more or other records" in text
        and "skip_records" not in text
        and "one process a cell" not in text
    )


SCRIPT = Matrix(
    name="mine",
    trainer="command",
    command=("python", "train.py", "--steps", "{steps}"),
    settings={"batch_size": "2", "precision": "half", "lr": "1e-3"},
    factors=(Factor("kernel", ("plain", "fused")),),
    flags={
        "kernel": {"plain": Expansion(), "fused": Expansion(("--kwargs", '{"fused": true}'))},
        "batch_size": {"*": Expansion(("--batch", "{value}"))},
        "precision": {"full": Expansion(("--full",)), "half": Expansion(config={"train.half": True})},
    },
)


def test_the_report_of_a_command_speaks_of_the_command() -> None:
    """No recipe, no records of the matrix: its own settings, what it was and what its flags became."""
    known = settings_of(VOCABULARIES["command"], SCRIPT.command, SCRIPT.flags)
    vocabulary = replace(VOCABULARIES["command"], settings=known)
    report = report_of(everything(GOOD), SCRIPT, vocabulary=vocabulary)
    text = to_markdown(report, Redactor.none())
    assert "recipe" not in text
    assert "skip_records" not in text
    assert "one process a cell" not in text
    assert "command=python train.py --steps {steps}" in report.settings
    assert "flags.batch_size=--batch {value}" in report.settings
    assert """flags.kernel=plain: nothing; fused: --kwargs '{"fused": true}'""" in report.settings
    assert "flags.precision=full: --full; half: config.train.half: true" in report.settings
    assert [str(step) for step in report.next_steps[1:3]] == [
        "Vary what this matrix leaves alone: `batch_size` and `precision`: `nanbisect run matrices/demo.yaml "
        "--factor 'batch_size=2|1|8' --factor 'precision=half|full'`",
        "Map under `flags` what the command takes of `attention` and `gradient_checkpointing`, and make it a factor.",
    ]


def test_options_of_the_old_run_do_not_leak_into_a_new_one() -> None:
    command = ("nanbisect", "run", "m.yaml", "--steps", "5", "--out", "x/y", "--resume", "--seed=3")
    report = report_of(everything(GOOD), command=command)
    assert report.next_steps[0].command == "nanbisect run m.yaml --seed=3 --steps 30"
    bad = report_of(command=command)
    assert bad.next_steps[0].command == "nanbisect rerun x/y 8"


def test_everything_failed_points_at_weights_and_data() -> None:
    report = report_of(everything(BAD))
    assert report.verdict.startswith(
        "No setting here matters: all 36 judged cells failed. Look at the weights, the data and how they are loaded: "
        "right after load the probe saw no non-finite weight or buffer. It surfaces in backward"
    )
    assert report.verdict.endswith("The baseline itself (cell 1, all first levels) is non-finite.")
    loaded = report_of(everything(replace(BAD, site=replace(SITE, phase="load"))))
    assert f"weights or buffers were already non-finite in 36 of 36 cells, first {K_PROJ}." in loaded.verdict


def test_the_records_that_every_failing_batch_held_are_named() -> None:
    """Batches of other sizes narrow them down; many that all cells share say nothing."""

    def held(levels: Mapping[str, str]) -> Outcome:
        first = {"1": 7, "2": 6, "8": 0}[levels["batch_size"]]
        return replace(BAD, suspects=tuple(f"utt{number}" for number in range(first, 8)))

    assert " Every failing batch held the record `utt7`." in report_of(held).verdict
    shared = replace(BAD, suspects=tuple(f"utt{number}" for number in range(8)))
    assert "Every failing batch" not in report_of(everything(shared)).verdict
    assert "Every failing batch" not in report_of(everything(replace(BAD, suspects=()))).verdict


def test_one_judged_cell_is_compared_with_nothing() -> None:
    report = report_of(lambda levels: BAD if levels == DEMO.baseline else None)
    assert report.verdict.startswith("The only judged cell failed, so there is nothing to compare it with; 35 cells")


def test_nothing_judged_gives_the_commonest_reason_and_the_mend() -> None:
    failed = Outcome(Status.FAILED, "no such file: train.jsonl", log_tail=("Traceback", "FileNotFoundError"))
    report = report_of(lambda levels: NO_FLASH if levels["attention"] == "flash" else failed)
    assert report.verdict.startswith(
        "No cell was judged: 12 unsupported and 24 failed; the commonest reason: no such file: train.jsonl. Read"
    )
    assert report.excerpt is not None
    assert report.excerpt.lines[-1] == "FileNotFoundError"
    assert [(tally.code, len(tally.cells)) for tally in report.reasons] == [("failed", 24), ("unsupported", 12)]


def test_an_interrupted_run_says_how_much_is_missing() -> None:
    report = report_of(
        lambda levels: demo(levels) if levels["gradient_checkpointing"] == "off" else None, interrupted=True
    )
    assert report.verdict.endswith("The run was interrupted: 18 of 36 cells were not run.")
    assert report.counts["not_run"] == 18
    assert report.next_steps[-1].command == (
        "nanbisect run matrices/demo.yaml --resume --out reports/demo-20251130-170000"
    )


@pytest.mark.parametrize("judge", [demo, everything(GOOD), everything(BAD), everything(NO_FLASH), everything(None)])
def test_no_report_claims_more_than_it_knows(judge: Judge) -> None:
    report = report_of(judge, interrupted=True)
    text = " ".join([report.verdict, *report.findings, *map(str, report.next_steps)]).lower()
    for word in ("root cause", "safe", "fixed"):
        assert word not in text


# the evidence


def test_the_smear_is_told_and_counted() -> None:
    assert report_of().smear == (
        "A check after clipping would have blamed embed_tokens.weight (16576 of 16576 elements); the first gradient to "
        "arrive non-finite was decoder.layers.1.k_proj.weight. Such a check would mislead in 8 of 8 failing cells."
    )
    honest = replace(BAD, smear=Smear(K_PROJ, 5, 10, K_PROJ))
    assert report_of(everything(honest)).smear == (
        f"A check after clipping would have blamed {K_PROJ} (5 of 10 elements) too: that is where the first non-finite "
        "gradient arrived."
    )


def test_each_cause_has_its_evidence_and_the_nearest_finite_cell() -> None:
    (found,) = report_of().causes
    assert (found.words, found.standing) == ("`attention=eager` together with `batch_size` 2 or 8", "proved")
    assert found.evidence[:3] == (
        "8 of 8 matching cells failed.",
        "With only this changed: `batch_size=1` is finite.",
        "With only this changed: `attention=sdpa` is finite and `attention=flash` was not judged (unsupported).",
    )
    assert found.pair is not None
    assert found.pair.neighbour is not None
    assert (found.pair.failing.number, found.pair.neighbour.number) == (8, 2)
    assert found.pair.neighbour.differs == ("batch_size",)
    assert found.pair.failing.command == "nanbisect rerun demo-20251130-170000 8"
    assert found.pair.failing.settings == (
        "precision=bf16",
        "learning_rate=1e-3",
        "gradient_checkpointing=off",
        "batch_size=2",
        "channel_weights=1,8",
        "attention=eager",
    )


def test_a_witness_is_the_preferred_neighbour() -> None:
    one = cause({"attention": ("eager",), "batch_size": ("2", "8")}, witnesses=(7,))
    (found,) = report_of(attribution=attribution(Finding.CAUSE, one)).causes
    assert found.pair is not None
    assert found.pair.neighbour is not None
    assert found.pair.neighbour.number == 7


def test_neutral_settings_either_agree_or_each_move_is_a_line() -> None:
    agreed = report_of(attribution=attribution(Finding.NOTHING_FAILED, compared=4))
    assert agreed.neutrality == (
        "4 pairs of finite cells that must agree at step 1 were compared and agree within rounding.",
    )
    moved = Divergence((1, 2), ("attention",), "loss", (3.5, 3.9), 0.1026, 0.02)
    (line,) = report_of(attribution=attribution(Finding.NOTHING_FAILED, divergences=(moved,), compared=4)).neutrality
    assert line == (
        "`attention` must not change the mathematics, but between cells 1 and 2 the loss of step 1 moves from 3.5 to "
        "3.9: 0.1 relative, where rounding explains 0.02."
    )
    assert report_of().no_difference == "No difference made: `gradient_checkpointing` and `channel_weights`."


def test_repairs_and_doubts_are_counted_by_code() -> None:
    noted = replace(
        GOOD, repairs=(Note("nan_to_num", "gradients were zeroed"),), doubts=(Note("scaler_skip", "2 skips"),)
    )
    report = report_of(lambda levels: noted if levels["attention"] == "sdpa" else demo(levels))
    assert [(tally.code, tally.text, len(tally.cells)) for tally in report.repairs] == [
        ("nan_to_num", "gradients were zeroed", 12)
    ]
    assert [(tally.code, len(tally.cells)) for tally in report.doubts] == [("scaler_skip", 12)]
    assert "`nan_to_num` in 12 cells (1, 4, 7" in to_markdown(report, Redactor.none())


# the grid and the table


def test_the_last_factors_are_columns_and_every_cell_has_a_mark() -> None:
    grid = report_of().grid
    assert (grid.row_title, grid.column_title) == (
        "gradient_checkpointing / batch_size",
        "channel_weights / attention",
    )
    assert grid.columns == ("1,8 / sdpa", "1,8 / eager", "1,8 / flash", "1,32 / sdpa", "1,32 / eager", "1,32 / flash")
    assert (grid.rows[0], grid.marks[0]) == ("off / 1", (".", ".", "-", ".", ".", "-"))
    assert (grid.rows[1], grid.marks[1]) == ("off / 2", (".", "NaN", "-", ".", "NaN", "-"))
    assert grid.legend == {".": "finite", "-": "unsupported"}


def test_every_way_to_end_has_its_own_mark() -> None:
    outcomes = [Outcome(status, "") for status in Status if status is not Status.NONFINITE]
    outcomes += [BAD, replace(BAD, site=replace(SITE, kind="+inf"))]
    factor = Factor("f", tuple(map(str, range(len(outcomes) + 1))))
    cells = [Cell(number, {"f": level}) for number, level in enumerate(factor.levels, start=1)]
    results = [CellResult(cell, (outcome,)) for cell, outcome in zip(cells, outcomes, strict=False)]
    (marks,) = build_grid(Matrix("m", "fake", (factor,)), [*results, CellResult(cells[-1])]).marks
    assert marks == (".", "-", "oom", "fail", "time", "kill", "none", "NaN", "Inf", " ")


def test_excluded_cells_are_marked_and_empty_rows_left_out() -> None:
    matrix = replace(DEMO, exclude=({"batch_size": "2"}, {"batch_size": "8", "attention": "flash"}))
    grid = report_of(matrix=matrix).grid
    assert grid.rows == ("off / 1", "off / 8", "on / 1", "on / 8")
    assert grid.marks[1] == (".", "NaN", "x", ".", "NaN", "x")
    assert grid.legend["x"] == "excluded by the matrix"


def test_the_table_has_a_row_a_cell() -> None:
    report = report_of()
    assert report.columns == (
        "cell", "gradient_checkpointing", "batch_size", "channel_weights", "attention", "status", "what", "loss",
        "norm", "time",
    )  # fmt: skip
    assert report.rows[7].status == "nonfinite"
    assert report.rows[7].texts == (
        "8", "off", "2", "1,8", "eager", "nonfinite", f"NaN in backward of step 1, first in the gradient of {K_PROJ}",
        "3.789", "NaN", "1.9 s",
    )  # fmt: skip
    assert report.rows[2].texts[5:7] == ("unsupported", "flash_attn is not installed")
    assert report_of(everything(None)).rows[0].texts[5] == "not run"


# markdown


def test_the_markdown_of_the_demo_says_it_all() -> None:
    text = to_markdown(report_of(), Redactor.none())
    for part in (
        "`attention=eager` together with `batch_size` 2 or 8 brings the NaN: 8 of 8 matching cells failed",
        "| off / 2 | . | NaN | - | . | NaN | - |",
        "blamed embed_tokens.weight (16576 of 16576 elements)",
        "<details><summary>All 36 cells</summary>",
        "### Reproduce\n\n```sh\nnanbisect run matrices/demo.yaml\nnanbisect rerun demo-20251130-170000 8 # non-finite",
        "\nnanbisect rerun demo-20251130-170000 2 # finite, differs in batch_size\n```",
    ):
        assert part in text
    assert text.endswith(
        "nanbisect 0.1.0, Python 3.11.2, torch 2.13.0, transformers 4.57.1, accelerate 1.12.0, on cpu\n"
    )


def test_a_large_grid_is_folded() -> None:
    large = replace(DEMO, factors=(*DEMO.factors, Factor("precision", ("fp32", "bf16"))), settings={})
    assert "<details><summary>The grid of 72 cells</summary>" in to_markdown(report_of(matrix=large), Redactor.none())
    assert "The grid of" not in to_markdown(report_of(), Redactor.none())


def test_secrets_and_paths_do_not_reach_the_page() -> None:
    redactor = Redactor(home="/home/amelie", user="amelie", host="node17", paths={"/data/exp": "."})
    why = "OSError: /home/amelie/data/x.jsonl on node17, token hf_abcdefghijklmnopqrstuvwx"
    failed = Outcome(Status.FAILED, why, log_tail=(why, 'File "/data/exp/a b/recipe.py"'))
    report = report_of(
        everything(failed), command=("nanbisect", "run", "/data/exp/m.yaml", "--set", "x=/data/amelie/y")
    )
    text = to_markdown(report, redactor)
    for word in ("amelie", "node17", "hf_abc", "/data/exp", "/data/amelie"):
        assert word not in text
    assert "nanbisect run ./m.yaml --set x=<path>/y" in text


HOSTILE = (
    "| a | `code` <script>alert(1)</script> <!-- hidden --> ![x](http://e.vil/p.png) [click](https://e.vil) @octocat "
    "@org/team #12 GH-7 org/repo#3 https://github.com/o/r/issues/1 www.e.vil a@b.example <https://e.vil> **bold** "
    "\x00\x1b[31m \u202e ]]> ``` ~~~ $x$ &copy; \ud800 </details>\n\n# heading\n- [ ] task\n> quote\n---\n```\n"
)
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
OURS = re.compile(r"</?details>|<details><summary>[\w ]+</summary>")


def assert_inert(markdown: str) -> None:
    """No HTML, link or image but our own folds; no live mention, reference or address outside code."""
    for token in PARSER.parse(markdown):
        if token.type == "html_block":
            assert all(OURS.fullmatch(line) for line in token.content.split("\n") if line), token.content
        for child in token.children or ():
            assert child.type in ("text", "code_inline", "softbreak", "em_open", "em_close"), child
            if child.type == "text":
                live = re.search(r"@\w|#\d|\bGH-\d|://|\bwww\.|mailto:", child.content, re.I)
                assert live is None, child.content
    tables = re.findall(r"(?m)(?:^\|.*\n)+", markdown)
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)
    markdown.encode()


def hostile(text: str) -> Report:
    """The demo with this text in every place that data or logs can reach."""
    names = ("gradient_checkpointing", text or "empty", "attention")
    matrix = Matrix(text, "sft", tuple(Factor(name, ("a", text + "b")) for name in names), settings={"k": text})
    site = replace(SITE, parameters=(text, text), channels=(text,))
    notes = (Note(text, text),)
    bad = replace(
        BAD, reason=text, site=site, smear=Smear(text, 1, 2, "x"), suspects=(text,), repairs=notes, doubts=notes
    )
    failed = Outcome(Status.FAILED, text, log_tail=(text,) * 3)
    verdicts = {0: GOOD, 1: failed, 2: bad}
    order = iter(range(100))
    environment = {"device": text, "packages": {text: text}, text: [text]}
    inputs = inputs_of(lambda levels: verdicts[next(order) % 3], matrix, environment=environment, command=("n", text))
    caution = Caution("x", text, text)
    return build(replace(inputs, folder=text, attribution=replace(inputs.attribution, cautions=(caution,))))


def test_hostile_data_is_shown_and_does_nothing() -> None:
    text = to_markdown(hostile(HOSTILE), Redactor.none())
    assert_inert(text)
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.sampled_from("`|<>@#[]()!*_~\\:/&$-. \n\tawG1é\ud800\u200b"), max_size=30))
def test_any_text_is_inert(text: str) -> None:
    assert_inert(to_markdown(hostile(text), Redactor.none()))


@given(st.text(st.sampled_from("`|<>@#[]!*_~\\: /&aw1"), max_size=40))
def test_a_sentence_keeps_its_words(text: str) -> None:
    """What a reader sees is what was written, but for blanks and the marks of code."""
    (paragraph,) = [token for token in PARSER.parse(f"x{rendered(text)}x") if token.type == "inline"]
    seen = "".join(child.content for child in paragraph.children or ())
    spans = re.sub(r"`(\s*)`", "", text)
    assert re.sub(r"[`\s\u200b]", "", seen) == re.sub(r"[`\s]", "", f"x{spans}x")


def test_twenty_thousand_cells_fit_into_one_comment() -> None:
    factors = (
        Factor("a", tuple(f"<{n}>|@x" for n in range(200))),
        Factor("b", tuple(f"é{n}`" * 50 for n in range(100))),
    )
    matrix = Matrix("big", "sft", factors)
    outcomes = {0: GOOD, 1: replace(BAD, reason="\U0001f600" * 5000), 2: Outcome(Status.FAILED, "<@&" * 5000)}
    results = tuple(CellResult(cell, (outcomes[cell.number % 3],)) for cell in expand(matrix))
    found = attribution(Finding.UNDECIDED, cautions=(Caution("c", "@" * 9999, "<" * 9999),) * 100)
    inputs = RunInputs(matrix, results, found, {"gpus": "@" * 9999}, "f" * 999, ("n", "\U0001f600" * 9999), "m")
    text = to_markdown(build(inputs), Redactor(home="/home/someone", user="someone", host="somehost"))
    assert len(text.encode()) < 65_536
    assert re.search(r"\*\d+ more left out here: see results\.csv and result\.json in the run folder\.\*", text)
    assert "### Reproduce" in text
    assert_inert(text)


@pytest.mark.parametrize("text", ["@" * 3000, "\U0001f600 " * 3000, "<`| " * 3000, "x" * 3000])
def test_a_page_with_everything_at_its_most_still_fits(text: str) -> None:
    matrix = Matrix(text, "sft", (*(Factor(f"{n}{text}", ("a", text)) for n in range(6)),), {text: text})

    def judge(levels: Mapping[str, str]) -> Outcome:
        number = next(numbers)
        site = replace(SITE, step=number, parameters=(f"{number}{text}",) * 8, channels=(text,))
        notes = (Note(f"{number}{text}", text),)
        link = dict.fromkeys(("operation", "phase", "module", "source", "kind", "label", "name", "kernel", "use"), text)
        tables = dict.fromkeys(("chain", "inputs", "outputs", "kernels", "before", "jumps", "also"), [link] * 40)
        origin = {**link, **tables, "hidden_by": [link], "surfaced": link, "channels": {text: "nan", "b": None}}
        bad = replace(BAD, site=site, suspects=(text,) * 20, repairs=notes, doubts=notes, origin=origin)
        return bad if number % 3 else Outcome(Status.FAILED, f"{number}{text}", log_tail=(text,) * 20)

    numbers = iter(range(1, 99))
    causes = [
        cause({f"{n}{text}": ("a", text)}, needed={text: {text: "finite"}}, alternatives=({text: (text,)},) * 9)
        for n in range(6)
    ]
    found = attribution(
        Finding.CAUSE,
        *causes,
        neutral=(text,) * 9,
        divergences=(Divergence((1, 2), (text,), text, (1.0, 2.0), 0.5, 0.1),) * 50,
        cautions=(Caution("c", text, text),) * 50,
    )
    environment = {"device": text, **{f"{n}": text for n in range(50)}}
    report = report_of(judge, matrix, attribution=found, environment=environment, command=("n", text), folder=text)
    page = to_markdown(report, Redactor(home="/home/someone", user="someone"))
    assert len(page.encode()) < 65_536
    assert "### Where it was born" in page
    assert_inert(page)


def test_an_origin_has_its_chain_and_numbers() -> None:
    tensor = {"name": "self", "shape": [2, 6], "dtype": "float32", "min": -1.0, "max": 2.0, "nan": 0, "posinf": 0}
    link = {
        "operation": "aten.log",
        "phase": "forward",
        "module": "",
        "source": "/home/someone/x/a.py:3",
        "kind": "nan",
    }
    origin = {
        **link, "label": "origin", "inputs": [{**tensor, "neginf": 3, "numel": 12}], "chain": [link], "step": 7,
        "surfaced": {"phase": "backward", "name": "module.a.weight"}, "way": "replay",
        "channels": {"a": None, "b": "nan"},
        "cost": {"seconds": 0.5, "plain_seconds": 0.25, "operations": 9}, "memory": "an unwritten buffer is read",
    }  # fmt: skip
    report = report_of(lambda levels: replace(BAD, origin=origin) if demo(levels) is BAD else demo(levels))
    assert report.origins[0].head == (
        "NaN born in forward: `aten.log` in the model itself (/home/someone/x/a.py:3); its input: self -1 to 2 with 3 "
        "-Inf of 12; surfaced in backward in `a.weight`."
    )
    assert report.origins[0].notes == (
        "Only the loss of channel `b` brings it (of 2, tried one by one).",
        "It comes and goes: an unwritten buffer is read.",
        "Step 7 was traced, replayed from its capsule: 9 operations in 0.50 s, 2.0 times a plain one.",
    )
    page = to_markdown(report, Redactor(home="/home/someone", user="someone"))
    assert "| aten.log | forward | the model itself | \\~/x/a.py:3 | NaN |  |" in page
    assert "| input self | 2 x 6 | float32 | -1 | 2 | 0 | 0 | 3 |" in page
    assert "/home/someone" not in page


# the machine-readable result


def test_the_result_has_the_documented_shape() -> None:
    result = to_result(inputs_of())
    json.dumps(result, allow_nan=False)
    assert list(result) == [
        "schema", "matrix", "environment", "counts", "cells", "causes", "neutral", "divergences", "completeness",
        "cautions",
    ]  # fmt: skip
    assert result["counts"] == {"finite": 16, "nonfinite": 8, "unsupported": 12}
    assert result["completeness"] == {
        "refuted": 73, "explained": 10, "untestable": 24, "pending": 0, "up_to_factors": 3,
    }  # fmt: skip
    assert result["neutral"] == ["gradient_checkpointing", "channel_weights"]
    (found,) = result["causes"]
    assert found["levels"] == {"batch_size": ["2", "8"], "attention": ["eager"]}
    assert (found["standing"], found["matching"], found["failed"], found["untested"]) == ("proved", 8, 8, 0)
    assert found["needed"] == {"batch_size": {"1": "finite"}, "attention": {"sdpa": "finite", "flash": "unsupported"}}


def test_a_cell_of_the_result() -> None:
    cell = to_result(inputs_of())["cells"][7]
    assert cell["id"] == "attention=eager,batch_size=2,channel_weights=1,8,gradient_checkpointing=off"
    assert cell["attempts"] == [{"attempt": 1, "seed": 0, "status": "nonfinite", "reason": BAD.reason, "seconds": 1.9}]
    assert cell["site"] == {
        "step": 1, "micro_batch": 0, "rank": 0, "phase": "backward", "kind": "nan", "channels": [],
        "parameters": [K_PROJ, "decoder.layers.1.q_proj.weight"],
    }  # fmt: skip
    assert (cell["origin"], cell["loss"], cell["grad_norm"]) == (None, [3.789], ["nan"])
    assert (cell["records"], cell["seconds"]) == (["utt01", "utt02"], 1.9)


def test_a_cell_that_was_not_run_has_no_status() -> None:
    result = to_result(inputs_of(everything(None)))
    assert result["counts"] == {"not_run": 36}
    cell = result["cells"][0]
    assert (cell["status"], cell["site"], cell["attempts"], cell["loss"]) == (None, None, [], [])
    assert result["completeness"]["pending"] == 107


def test_completeness_of_a_run_without_a_known_cause() -> None:
    unknown = attribution(Finding.UNDECIDED, cause({"attention": ("eager",)}, Standing.NOT_TOLD_APART))
    complete = to_result(inputs_of(attribution=unknown))["completeness"]
    assert (complete["explained"], complete["pending"], complete["refuted"], complete["untestable"]) == (0, 10, 73, 24)


# words


def test_levels_with_commas_are_marked() -> None:
    assert combination({"channel_weights": ("1,8", "1,32")}) == "`channel_weights` `1,8` or `1,32`"
    assert combination({"a": ("1",), "b": ("2", "4", "8"), "c": ("3",)}) == (
        "`a=1` together with `c=3` and `b` 2, 4 or 8"
    )
    assert combination({"a": ("x`y\n",)}) == "`a=x'y`"


def test_numbers_and_cuts() -> None:
    assert [figure(value) for value in (3.78912, 1e-9, math.nan, math.inf, -math.inf)] == [
        "3.789", "1e-09", "NaN", "Inf", "-Inf",
    ]  # fmt: skip
    assert clip("abcdef", 4) == "abc…"
    assert clip("abcd", 4) == "abcd"
