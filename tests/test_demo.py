"""The demo and its turns, by real trainings: the verdict must follow the fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.commands import ROOT, Done, nanbisect, result

pytestmark = pytest.mark.training
SMALL = ("--set", "gradient_checkpointing=off", "--set", "channel_weights=1,8", "--factor", "attention=sdpa|eager")


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A copy of the demo to be changed."""
    shutil.copytree(ROOT / "matrices" / "demo", tmp_path / "demo")
    shutil.copy(ROOT / "matrices" / "demo.yaml", tmp_path)
    return tmp_path


def change(demo: Path, old: str, new: str) -> None:
    """Edit the copied recipe; the old text must be there, once."""
    path = demo / "demo" / "tts.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def run(demo: Path, *flags: str) -> Done:
    """Run the copied demo into `demo/out`."""
    return nanbisect("run", "demo.yaml", "--out", "out", *flags, cwd=demo)


def test_the_demo_names_its_cause_and_reruns_at_the_same_place(tmp_path: Path) -> None:
    """36 cells, one proved cause of two parts, two neutral factors; issue 196's signature."""
    out = tmp_path / "out"
    done = nanbisect("run", ROOT / "matrices" / "demo.yaml", "--out", out, "--jobs", "2", cwd=tmp_path)
    assert done.code == 1, done.err
    found = result(out)
    assert found["counts"] == {"finite": 16, "nonfinite": 8, "unsupported": 12}
    (cause,) = found["causes"]
    assert cause["levels"] == {"attention": ["eager"], "batch_size": ["2", "8"]}
    assert (cause["standing"], cause["matching"], cause["failed"], cause["untested"]) == ("proved", 8, 8, 0)
    assert cause["needed"] == {"attention": {"sdpa": "finite", "flash": "unsupported"}, "batch_size": {"1": "finite"}}
    assert sorted(found["neutral"]) == ["channel_weights", "gradient_checkpointing"]
    for cell in found["cells"]:
        if cell["status"] == "nonfinite":
            assert cell["site"]["step"] == 1
            assert (cell["site"]["phase"], cell["site"]["kind"]) == ("backward", "nan")
            assert isinstance(cell["loss"][0], float)
            assert cell["grad_norm"][0] == "nan"
            assert cell["smear"] == {
                "blamed": "embed_tokens.weight", "bad": 16576, "numel": 16576,
                "first": "decoder.layers.1.k_proj.weight",
            }  # fmt: skip
    report = (out / "report.md").read_text()
    assert "would have blamed embed_tokens.weight" in report
    assert str(tmp_path) not in report
    again = nanbisect("rerun", out, "8", cwd=tmp_path)
    assert again.code == 1
    assert "ended the same way, at the same place" in again.out
    other = nanbisect("rerun", out, "8", "--with", "padding_side=right", cwd=tmp_path)
    assert (other.code, "ended otherwise: finite now" in other.out) == (0, True)
    assert len(result(out)["cells"][7]["attempts"]) == 2


def test_right_padding_does_not_reproduce(demo: Path) -> None:
    """No row of padding without anything to attend to, no NaN."""
    done = run(demo, *SMALL, "--set", "padding_side=right")
    assert done.code == 0, done.err
    assert result(demo / "out")["causes"] == []
    assert "not reproduced" in done.out


def test_equal_lengths_do_not_reproduce(demo: Path) -> None:
    """Without padding no row is masked out."""
    lines = (demo / "demo" / "train.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    equal = [json.dumps({**record, "id": f"same{number}"}) for number in range(8)]
    (demo / "demo" / "train.jsonl").write_text("\n".join(equal))
    done = run(demo, *SMALL)
    assert done.code == 0, done.err
    assert "not reproduced" in done.out


def test_mended_attention_does_not_reproduce(demo: Path) -> None:
    """Let rows of padding attend to everything."""
    change(demo, "masked_fill(~allowed, float", "masked_fill(~(allowed | ~allowed.any(-1, keepdim=True)), float")
    done = run(demo, *SMALL)
    assert done.code == 0, done.err
    assert "not reproduced" in done.out


MENDED = """
def eager(query, key, value, allowed):
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.masked_fill(~allowed, -1e4).softmax(dim=-1).to(value.dtype) @ value


def sdpa(query, key, value, allowed):"""
SDPA = "return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)"
SWAPPED = (
    "--set", "gradient_checkpointing=off", "--set", "channel_weights=1,8", "--factor", "attention=eager|sdpa",
)  # fmt: skip


@pytest.mark.parametrize("beside", [False, True], ids=["instead of the kernel", "beside the kernel"])
def test_the_fault_moved_to_the_other_branch_moves_the_cause(demo: Path, beside: bool) -> None:
    """No code path of nanbisect knows the demo: the same arithmetic in sdpa's branch is found there.

    Without torch's own kernel the branch is no sdpa any more, and a caution says what the graph shows.
    """
    fault = "hand(query, key, value, allowed)"
    change(demo, SDPA, f"{SDPA} + 0 * {fault}" if beside else f"return {fault}")
    change(demo, "def eager(query, key, value, allowed):", f"def {fault}:")
    change(demo, "\ndef sdpa(query, key, value, allowed):", MENDED)
    done = run(demo, *SWAPPED)
    assert done.code == 1, done.err
    found = result(demo / "out")
    (cause,) = found["causes"]
    assert cause["levels"] == {"batch_size": ["2", "8"], "attention": ["sdpa"]}
    assert cause["standing"] == "proved"
    doubted = "attention_otherwise" in {caution["code"] for caution in found["cautions"]}
    assert doubted is not beside


def test_a_second_independent_fault_is_a_second_cause(demo: Path) -> None:
    """sqrt at zero in the loss, only where the audio weight is 32."""
    change(
        demo,
        'name = "text" if channel == 0 else f"codebook{channel}"',
        'name = "text" if channel == 0 else f"codebook{channel}"\n'
        "        if channel == 5 and HEAVY:\n"
        "            total = total + (channel_logits * 0.0).sum().abs().sqrt()",
    )
    change(
        demo, "    reentrant = {", "    global HEAVY\n    HEAVY = settings.channel_weights[1] == 32\n    reentrant = {"
    )
    change(demo, "IGNORED = -100", "IGNORED = -100\nHEAVY = False")
    flags = ("--set", "gradient_checkpointing=off", "--factor", "attention=sdpa|eager", "--factor", "batch_size=1|2")
    done = run(demo, *flags)
    assert done.code == 1, done.err
    causes = {
        json.dumps(cause["levels"], sort_keys=True): cause["standing"] for cause in result(demo / "out")["causes"]
    }
    assert causes == {
        '{"attention": ["eager"], "batch_size": ["2"]}': "proved",
        '{"channel_weights": ["1,32"]}': "proved",
    }


RECIPE = '''
"""A recipe from the four functions alone: a small regressor on vectors, two channels, no attention."""
import torch


class Net(torch.nn.Module):
    def __init__(self, risky):
        super().__init__()
        self.body, self.near, self.far = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
        self.risky = risky

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        zero = hidden - hidden
        square = (zero ** 2).sum(-1, keepdim=True)
        length = square.sqrt() if self.risky else zero.norm(dim=-1, keepdim=True)
        return self.near(hidden) + length, self.far(hidden)


def model(settings):
    return Net(risky=settings.max_length == 7)


def records(settings):
    generator = torch.Generator().manual_seed(settings.seed)
    for number in range(40):
        yield {"id": f"row{number}", "x": torch.randn(4, generator=generator), "y": float(number % 3)}


def collate(records, settings):
    return {"x": torch.stack([r["x"] for r in records]), "y": torch.tensor([r["y"] for r in records])}


def losses(model, batch):
    near, far = model(batch["x"])
    count = len(batch["y"])
    return {
        "near": (((near.squeeze(-1) - batch["y"]) ** 2).sum(), count),
        "far": (((far.squeeze(-1) - batch["y"]) ** 2).sum(), count),
    }
'''

MATRIX = """
name: rows
trainer: sft
recipe: rows.py
steps: 2
settings: {precision: fp32, optimizer: sgd}
factors:
  max_length: [5, 7]
  batch_size: [1, 4]
  loss_reduction: [mean_per_channel, token_weighted]
"""


def test_a_recipe_unlike_the_demo_works(tmp_path: Path) -> None:
    """Written from the design alone: no text, no attention, no data file."""
    (tmp_path / "rows.py").write_text(RECIPE)
    (tmp_path / "rows.yaml").write_text(MATRIX)
    done = nanbisect("run", "rows.yaml", "--out", "out", cwd=tmp_path)
    assert done.code == 1, done.out + done.err
    found = result(tmp_path / "out")
    assert [cause["levels"] for cause in found["causes"]] == [{"max_length": ["7"]}]
    assert sorted(found["neutral"]) == ["batch_size", "loss_reduction"]


BAD_RECORD = """

def records(settings):
    for number in range(24):
        yield {"id": f"row{number + 1}", "x": torch.ones(4) * (0.0 if number == 5 else number + 1.0), "y": 1.0}


def losses(model, batch):
    near, far = model(batch["x"])
    size = (batch["x"] * model.body.weight[0]).pow(2).sum(-1).sqrt()  # its gradient at 0 is inf, times 0
    return {"near": (((near.squeeze(-1) - batch["y"]) ** 2 + size).sum(), len(batch["y"]))}
"""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_fatal_record_does_not_make_batch_size_a_cause(tmp_path: Path, precision: str) -> None:
    """Record 6 of 8 is fatal by itself; every batch size meets it, so batch size is not accused.

    A GradScaler takes the NaN for an overflow and skips: the step is tried again until scale 1 shows it.
    """
    (tmp_path / "rows.py").write_text(RECIPE + BAD_RECORD)
    matrix = MATRIX.replace("  max_length: [5, 7]\n", "").replace("[1, 4]", "[1, 2, 8]").replace("steps: 2", "steps: 3")
    (tmp_path / "rows.yaml").write_text(matrix)
    fixed = ("--set", "loss_reduction=mean_per_channel", "--set", f"precision={precision}")
    done = nanbisect("run", "rows.yaml", "--out", "out", *fixed, cwd=tmp_path)
    assert done.code == 1, done.out + done.err
    found = result(tmp_path / "out")
    assert found["counts"] == {"nonfinite": 3}
    assert all("batch_size" not in cause["levels"] for cause in found["causes"])
    assert "No setting here matters" in done.out
    by_size = {cell["levels"]["batch_size"]: cell for cell in found["cells"]}
    assert {size: cell["site"]["step"] for size, cell in by_size.items()} == {"1": 6, "2": 3, "8": 1}
    assert by_size["1"]["suspects"] == ["row6"]
