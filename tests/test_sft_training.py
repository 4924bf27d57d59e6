"""The built-in trainer in real processes under the probe, judged as the driver judges them.

Jobs of one test run two at a time; a process costs a few seconds, most of them imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanbisect.evidence import Effect, Evidence
from nanbisect.executors.base import Exit
from nanbisect.judging import judge
from nanbisect.outcome import Outcome, Status
from nanbisect.store import read_evidence
from nanbisect.trainers.base import probe_environment
from nanbisect.trainers.sft import effect
from nanbisect.trainers.sft.job import Job
from tests import tiny

pytestmark = pytest.mark.training
TIMEOUT = 120


@dataclass(frozen=True)
class Trained:
    """What a process left."""

    evidence: Evidence
    job: Job
    log: str

    def outcome(self, *factors: str) -> Outcome:
        """The verdict, when the matrix varies these settings."""

        def effect_of(resolved: Mapping[str, Any]) -> Effect:
            return effect.effect_of(self.job.settings, frozenset(factors), resolved)

        return judge(self.evidence, attempt=1, seed=0, effect_of=effect_of)


COLD = ("-m", "nanbisect.trainers.sft")
IMPORTED = ("-c", "import runpy, torch; runpy._run_module_as_main('nanbisect.trainers.sft')")


def train(job: Job, *, start: Sequence[str] = COLD, variables: Mapping[str, str] | None = None) -> Trained:
    """One job in a process of its own, with the probe."""
    folder = Path(job.folder)
    folder.mkdir()
    job.write(folder / "job.json")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **probe_environment(folder, os.environ)}
    env |= variables or {}
    argv = [sys.executable, *start, str(folder / "job.json")]
    began = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        code = subprocess.run(argv, env=env, stdout=log, stderr=log, timeout=TIMEOUT, check=False).returncode
    ended = Exit("exited", max(code, 0), -code if code < 0 else None, time.monotonic() - began)
    return Trained(read_evidence(folder, ended), job, (folder / "log.txt").read_text(encoding="utf-8"))


def train_all(jobs: Mapping[str, Job]) -> dict[str, Trained]:
    """Several jobs, two at a time, under the names they were given."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(train, jobs.values()), strict=True))


# the four families -----------------------------------------------------------------------------

CELLS = {
    "llama": [
        {"attention": "eager", "gradient_checkpointing": "off"},
        {"attention": "sdpa", "gradient_checkpointing": "on", "padding_side": "left", "param_dtype": "bf16"},
    ],
    "qwen3": [
        {"attention": "eager", "gradient_checkpointing": "reentrant", "padding_side": "left"},
        {"attention": "sdpa:math", "gradient_checkpointing": "reentrant"},
    ],
    "gpt2": [
        {"attention": "eager", "gradient_checkpointing": "on", "padding_side": "left"},
        {"attention": "sdpa", "gradient_checkpointing": "off"},
    ],
    "gemma": [
        {"attention": "eager", "gradient_checkpointing": "on"},
        {"attention": "sdpa:flash", "gradient_checkpointing": "reentrant"},
    ],
}
CLASSES = {"llama": "Llama", "qwen3": "Qwen3", "gpt2": "GPT2LMHead", "gemma": "Gemma"}
KERNELS = {"eager": "SoftmaxBackward0", "sdpa:math": "SafeSoftmaxBackward0", "sdpa:flash": "ScaledDotProductFlash"}


def test_every_family_trains_with_its_settings_in_effect(tmp_path: Path) -> None:
    data = tiny.write_lines(tmp_path / "chat.jsonl", tiny.chats(3))
    jobs: dict[str, Job] = {}
    for family, cells in CELLS.items():
        model = tiny.checkpoint(tmp_path / family, family)
        for settings in cells:
            name = f"{family}-{len(jobs)}"
            given = {"precision": "bf16", "batch_size": "3", **settings}
            jobs[name] = Job("causal-lm", given, str(tmp_path / name), 6, model=str(model), data=str(data))
    for name, done in train_all(jobs).items():
        family, given_to = name.partition("-")[0], done.job.settings
        outcome = done.outcome("attention", "gradient_checkpointing", "padding_side", "param_dtype")
        assert (name, outcome.status, outcome.reason[:5]) == (name, Status.FINITE, "every")
        assert outcome.records == ("chat0", "chat1", "chat2")
        check_resolved(family, given_to, outcome.resolved)
        assert len(outcome.loss) == 2
        assert all(value > 0 for value in outcome.loss + outcome.grad_norm)


def check_resolved(family: str, settings: Mapping[str, str], found: Mapping[str, Any]) -> None:
    """What the process said of itself, and what the probe saw."""
    attention, level = settings["attention"], settings["gradient_checkpointing"]
    assert found["model_class"] == f"{CLASSES[family]}{'Model' if family == 'gpt2' else 'ForCausalLM'}"
    assert found["attention_class"] == attention.partition(":")[0]
    assert any(KERNELS.get(attention, "") in kernel for kernel in found["kernels"])
    assert found["dropout"] is (family == "gpt2")
    assert set(found["parameter_dtypes"]) == {"bfloat16" if settings.get("param_dtype") == "bf16" else "float32"}
    assert (found["recomputed"] > 0, found["nested"] > 0) == (level != "off", level == "reentrant")
    assert (found["rows"], found["padding"] > 0) == (3, True)
    assert "padding_side" in found["read_by_recipe"]


# users' recipes --------------------------------------------------------------------------------

RECIPE = """
import os
import torch

class Config:
    _attn_implementation = torch.float32  # a user's config may hold anything

def model(settings):
    settings.gradient_checkpointing
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    layer.config = Config()
    return layer

def records(settings):
    return [{"id": n} for n in range(3)]

def collate(records, settings):
    return torch.full((len(records), 2), 0.1)

def losses(model, batch):
    return {"text": (model(batch).float().sum(), len(batch))}
"""
LOSS = "model(batch).float().sum()"


def recipe_job(folder: Path, name: str, text: str, size: int = 3, **settings: str) -> Job:
    """A job of a recipe of its own; forgetting to change the text is an error."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return Job(str(folder / f"{name}.py"), settings, str(folder / name), size)


def with_loss(expression: str) -> str:
    assert LOSS in RECIPE
    return RECIPE.replace(LOSS, expression)


def test_records_are_repeated_and_the_last_step_may_be_short(tmp_path: Path) -> None:
    job = recipe_job(tmp_path, "short", RECIPE, size=7, batch_size="2", gradient_accumulation="3")
    done = train(job)
    assert done.outcome().status is Status.FINITE
    lines = [(line["step"], line["records"]) for line in done.evidence.lines("micro_batch")]
    assert lines == [(1, ["0", "1"]), (1, ["2", "0"]), (1, ["1", "2"]), (2, ["0"])]
    assert [len(line["losses"]) for line in done.evidence.lines("step")] == [3, 1]
    assert [line["channels"][0]["text"][1] for line in done.evidence.lines("step")] == [2, 1]
    assert done.outcome().resolved["attention_class"] is None
    unread = done.outcome("attention")
    assert (unread.status, unread.reason.endswith("the recipe never read settings.attention")) == (
        Status.UNSUPPORTED, True,
    )  # fmt: skip


def test_what_does_not_take_effect_is_not_judged(tmp_path: Path) -> None:
    bad = with_loss(f"{LOSS} * float('nan')")
    jobs = {
        name: recipe_job(tmp_path, name, text, gradient_checkpointing="on")
        for name, text in (("finite", RECIPE), ("nan", bad))
    }
    for done in train_all(jobs).values():
        outcome = done.outcome()
        assert outcome.status is Status.UNSUPPORTED
        assert "nothing was recomputed" in outcome.reason


HEALTHY = LOSS  # 65536, the first scale, is Inf in fp16
HOPELESS = "model(batch * 3e5).float().sum() * 100"  # Inf at scale 1, too


def test_an_overflow_that_a_scaler_absorbs_and_one_that_it_cannot(tmp_path: Path) -> None:
    jobs = {
        "healthy": recipe_job(tmp_path, "healthy", with_loss(HEALTHY), precision="fp16", max_grad_norm="none"),
        "hopeless": recipe_job(tmp_path, "hopeless", with_loss(HOPELESS), precision="fp16"),
        "unscaled": recipe_job(tmp_path, "unscaled", with_loss(HOPELESS), precision="fp16", optimizer="none"),
    }
    done = train_all(jobs)
    healthy = done["healthy"].outcome()
    assert healthy.status is Status.FINITE
    assert "scaler_skip" in [note.code for note in healthy.doubts]
    steps = done["healthy"].evidence.lines("step")
    assert (steps[0]["taken"], steps[0]["grad_norm"] in ("nan", "+inf")) == (False, True)
    assert sum(line["taken"] for line in steps) == 3
    met = [line["records"] for line in done["healthy"].evidence.lines("micro_batch")]
    assert met[:2] == [["0"], ["0"]]  # a step that was skipped is tried again on the same records
    assert met[-1] == ["2"]
    assert len(healthy.loss) == 3
    for name in ("hopeless", "unscaled"):
        outcome = done[name].outcome()
        assert (name, outcome.status) == (name, Status.NONFINITE)
        assert outcome.site is not None
        assert outcome.site.phase == "backward"
        assert (outcome.site.step, outcome.suspects) == (1, ("0",))


COUNTING = """
LIVE = []

def counted(model, batch):
    if not LIVE:
        LIVE.append(0)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: look(model))
    return model(batch).float().sum()

def look(model):
    LIVE.append(sum(parameter.grad is not None for parameter in model.parameters()))
    open(os.path.join(os.path.dirname(__file__), NAME), "a").write(f"{LIVE[-1]} ")
"""


def test_without_an_optimizer_gradients_are_freed_and_still_judged(tmp_path: Path) -> None:
    def text(name: str, factor: str = "") -> str:
        return with_loss(f"counted(model, batch){factor}") + COUNTING.replace("NAME", repr(f"{name}.live"))

    jobs = {
        "kept": recipe_job(tmp_path, "kept", text("kept")),
        "freed": recipe_job(tmp_path, "freed", text("freed"), optimizer="none"),
        "bad": recipe_job(tmp_path, "bad", with_loss(f"({LOSS} * 0).sqrt()"), optimizer="none"),
    }
    done = train_all(jobs)
    live = {name: {int(n) for n in (tmp_path / f"{name}.live").read_text().split()} for name in ("kept", "freed")}
    assert max(live["kept"]) == 4
    assert live["freed"] == {0}
    freed, kept = done["freed"].outcome(), done["kept"].outcome()
    assert (freed.status, kept.status) == (Status.FINITE, Status.FINITE)
    assert freed.grad_norm[0] == pytest.approx(kept.grad_norm[0], rel=1e-5)
    bad = done["bad"].outcome()
    assert bad.status is Status.NONFINITE
    assert bad.site is not None
    assert (bad.site.step, bad.site.phase, len(bad.site.parameters)) == (1, "backward", 4)
    assert len(bad.loss) == 1  # it stopped there


def test_unwritten_memory_is_a_nan_only_where_it_is_filled(tmp_path: Path) -> None:
    fresh = with_loss(f"{LOSS} + torch.empty(1 << 24)[0]")  # 64 MiB come from the system as zeros
    done = train_all(
        {
            level: recipe_job(tmp_path, level.replace("+", "_"), fresh, deterministic=level)
            for level in ("kernels", "kernels+fill")
        }
    )
    assert done["kernels"].outcome().status is Status.FINITE
    assert done["kernels+fill"].outcome().status is Status.NONFINITE


CHECKED = """
import sys
from nanbisect.trainers.sft.__main__ import main

assert main([sys.argv[1], "--check"]) == 0
print("_dynamo imported:", "torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(("level", "imported"), [("adamw", False), ("adamw_foreach", True)])
def test_only_optimizers_with_kernels_of_their_own_are_tried(tmp_path: Path, level: str, imported: bool) -> None:
    """Making any takes longer than the rest of the check: torch imports its compiler for it."""
    job = replace(recipe_job(tmp_path, "checked", RECIPE), levels={"optimizer": (level,)})
    done = train(job, start=("-c", CHECKED))
    assert [line["level"] for line in done.evidence.lines("tried")] == [level]
    assert f"_dynamo imported: {imported}" in done.log


ALL_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
EVER_NEW_SHAPES = """
from pathlib import Path
import torch

def model(settings):
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()

def records(settings):
    return [{"id": n} for n in range(99)]

def collate(records, settings):
    return torch.full((64 + int(records[0]["id"]), 64), 0.1).bfloat16()

def losses(model, batch):
    if len(batch) in (80, 162):
        print("KiB:", *[line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmRSS")])
    return {"text": (model(batch).float().sum(), len(batch))}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read in /proc")
@pytest.mark.skipif(
    not (hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN multiplies no bf16 on this processor",
)
def test_kernels_of_shapes_that_are_gone_are_not_kept_unless_the_user_says(tmp_path: Path) -> None:
    """Also where torch was imported before, as in a server's fork; with the same losses."""
    few = train(recipe_job(tmp_path, "few", EVER_NEW_SHAPES, size=99), start=IMPORTED)
    many = train(recipe_job(tmp_path, "many", EVER_NEW_SHAPES, size=99), variables=ALL_KERNELS)
    assert few.outcome().loss == many.outcome().loss
    assert grown(few) < grown(many) / 3, (grown(few), grown(many))


def grown(done: Trained) -> int:
    """KiB between the two marks that the recipe printed."""
    before, after = (int(line.split()[1]) for line in done.log.splitlines() if line.startswith("KiB:"))
    return after - before


ATTENDING = "torch.nn.functional.scaled_dot_product_attention(*[batch[None, None]] * 3).sum()"


def test_ends_that_are_no_verdict(tmp_path: Path) -> None:
    jobs = {
        "full": recipe_job(tmp_path, "full", with_loss("torch.empty(1 << 50)")),
        "abort": recipe_job(tmp_path, "abort", with_loss("os.abort()")),
        "raises": recipe_job(tmp_path, "raises", with_loss("model(batch[:, :1])")),
        "kernel": recipe_job(tmp_path, "kernel", with_loss(ATTENDING), attention="sdpa:efficient"),
    }
    done = train_all(jobs)
    outcomes = {name: trained.outcome() for name, trained in done.items()}
    assert outcomes["full"].status is Status.OUT_OF_MEMORY
    assert (outcomes["abort"].status, outcomes["abort"].reason) == (Status.FAILED, "crashed with SIGABRT")
    raised = outcomes["raises"]
    assert (raised.status, raised.bad_input) == (Status.FAILED, True)
    assert "raises.py failed in losses: RuntimeError: mat1 and mat2" in raised.reason
    assert "Traceback" in done["raises"].log
    assert "Traceback" not in json.dumps(done["raises"].evidence.end)
    assert (outcomes["kernel"].status, dict(outcomes["kernel"].blocked)) == (Status.UNSUPPORTED, {})
    assert "no attention kernel takes this" in outcomes["kernel"].reason
