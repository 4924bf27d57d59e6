"""Programs as people start them, unmodified: a matrix finds the cause in each, and `watch` the place.

The fault is one that research code has (pytorch/pytorch#41508): attention by hand, -inf outside the mask,
rows of padding set to 0 after the softmax. It takes two settings: eager attention, and a batch of two
records of which one is shorter, padded on the left.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Done, nanbisect, result

pytestmark = pytest.mark.training
PYTHON = sys.executable

MODEL = """
import argparse, sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
torch.set_num_threads(1)


def eager(query, key, value, allowed):
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + bias).softmax(dim=-1)
    return weights.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0) @ value


def sdpa(query, key, value, allowed):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        self.attend = {"eager": eager, "sdpa": sdpa}[attention]
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, input_ids, attention_mask, labels):
        length = input_ids.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask.bool()[:, None, :]
        states = self.embed(input_ids)
        for layer in self.layers:
            states = states + self.attend(*layer(states).chunk(3, dim=-1), allowed)
        loss = F.cross_entropy(self.head(states)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss}


rows = [{"id": "r%d" % i, "tokens": torch.arange(5 if i == SHORT else 8) + i} for i in range(16)]


def collate(batch):
    tokens = [row["tokens"] % 32 for row in batch]
    longest = max(map(len, tokens))
    ids = torch.stack([F.pad(row, (longest - len(row), 0)) for row in tokens])
    mask = torch.stack([F.pad(torch.ones_like(row), (longest - len(row), 0)) for row in tokens])
    names = {} if "transformers" in sys.modules else {"id": [row["id"] for row in batch]}
    return {**names, "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=4)
    return parser.parse_args()
"""

LOOP = """
for step, batch in enumerate(loader, start=1):
    batch.pop("id")
    BACKWARD(model(**batch)["loss"])
    norm = CLIP(model.parameters(), 1.0)
    bad = next((name for name, p in model.named_parameters() if not p.grad.isfinite().all()), None)
    optimizer.step()
    optimizer.zero_grad()
    sys.stdout.write("step %d first_nonfinite_grad=%s\\n" % (step, bad))  # in one piece: ranks share the pipe
    if step == args.max_steps:
        break
"""
PLAIN_LOOP = LOOP.replace("BACKWARD", "torch.Tensor.backward").replace("CLIP", "nn.utils.clip_grad_norm_")

MATRIX = """
device: cpu
flags:
  attention: [--attention, "{value}"]
  batch_size: [--batch-size, "{value}"]
factors:
  attention: [sdpa, eager]
  batch_size: [1, 2]
"""


def programs(folder: Path, script: str, matrix: str, short: int = 3) -> None:
    """The script with its model, and the matrix over it."""
    (folder / "train.py").write_text(MODEL.replace("SHORT", str(short)) + script)
    (folder / "m.yaml").write_text(matrix.replace("PYTHON", PYTHON))


def the_cause(folder: Path, levels: Mapping[str, list[str]]) -> dict[str, Any]:
    """Run the matrix of 2 x 2: one cell fails, and both settings are proved to be needed. Returns that cell."""
    done = nanbisect("run", "m.yaml", "--out", "out", "--jobs", "2", cwd=folder)
    if "failed" in result(folder / "out")["counts"]:  # gloo aborts at exit now and then: not judged, so once more
        done = nanbisect("run", "m.yaml", "--out", "out", "--jobs", "2", "--resume", cwd=folder)
    assert done.code == 1, done.out + done.err
    data = result(folder / "out")
    assert data["counts"] == {"finite": 3, "nonfinite": 1}
    assert [(cause["levels"], cause["standing"]) for cause in data["causes"]] == [(levels, "proved")]
    (cell,) = (cell for cell in data["cells"] if cell["status"] == "nonfinite")
    return dict(cell)


BOTH = {"attention": ["eager"], "batch_size": ["2"]}


def watched(folder: Path, *command: str, gloo: bool = False) -> tuple[Done, dict[str, Any]]:
    """Watch a command to its own end; what was told, and what was written. Under `gloo` it may abort at its exit."""
    done = nanbisect("watch", "--json", "seen.json", "--", *command, cwd=folder)
    assert done.code == 0 or (gloo and "exitcode: -6" in done.err), done.out + done.err
    return done, json.loads((folder / "seen.json").read_text())


# a transformers Trainer script -----------------------------------------------------------------

TRAINER = """
from dataclasses import dataclass
from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Own:
    attention: str = "sdpa"


own, args = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
args.remove_unused_columns = False
Trainer(Model(own.attention), args, train_dataset=rows, data_collator=collate).train()
"""
TRAINER_MATRIX = """
trainer: transformers
command: [PYTHON, train.py, --use_cpu, "true", --disable_tqdm, "true", --train_sampling_strategy, sequential]
steps: 2
device: cpu
settings: {precision: fp32, learning_rate: 1e-3}
flags:
  attention: [--attention, "{value}"]
factors:
  attention: [sdpa, eager]
  batch_size: [1, 2]
"""


def test_a_trainer_script(tmp_path: Path) -> None:
    """The Trainer logs 0.0 and goes on; the rows of its dataset are named."""
    programs(tmp_path, TRAINER, TRAINER_MATRIX)
    cell = the_cause(tmp_path, BOTH)
    assert (cell["site"]["step"], cell["site"]["phase"], cell["suspects"]) == (2, "backward", ["row 2", "row 3"])
    own = ("--use_cpu", "true", "--attention", "eager", "--per_device_train_batch_size", "2", "--max_steps", "4")
    quiet = ("--logging_steps", "1", "--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true")
    done, seen = watched(
        tmp_path, PYTHON, "train.py", *own, *quiet, "--train_sampling_strategy", "sequential", "--output_dir", "o"
    )
    assert "NaN in backward of step 2, first in the gradient of layers.1.bias, while the loss is finite" in done.err
    assert "records of that batch: row 2, row 3 (rows of the dataset" in done.err
    assert "would have blamed embed.weight (512 of 512 elements)" in done.err
    assert "its NaN filter (logging_nan_inf_filter) is on" in done.err
    assert (seen["status"], seen["suspects"]) == ("nonfinite", ["row 2", "row 3"])


# torchrun, and a record that only rank 1 gets --------------------------------------------------

DDP = (
    """
import torch.distributed as dist
from torch.utils.data import DistributedSampler
args = arguments()
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(Model(args.attention))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(rows, shuffle=False)  # rank 0 has 0, 2, 4 ..., rank 1 has 1, 3, 5 ...
loader = DataLoader(rows, batch_size=args.batch_size, sampler=sampler, collate_fn=collate)
"""
    + PLAIN_LOOP
    + "dist.barrier()\ndist.destroy_process_group()\n"
)
DDP_MATRIX = (
    """
trainer: command
command: [
  PYTHON, -m, torch.distributed.run, --nproc_per_node, "2", --master_port, "{port}", train.py, --max-steps, "{steps}",
]
steps: 2
"""
    + MATRIX
)


def test_torchrun_where_only_rank_1_gets_the_bad_record(tmp_path: Path) -> None:
    """The script blames the embedding on both ranks; it began in a layer of rank 1, with its own two records."""
    programs(tmp_path, DDP, DDP_MATRIX, short=5)
    cell = the_cause(tmp_path, BOTH)
    assert cell["suspects"] == ["r5", "r7"]
    assert cell["site"]["rank"] == 1
    assert cell["site"]["ranks"] == {"of": 2, "by_itself": [1], "by_reduction": [0]}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "on rank 1 of 2 (rank 0 got it by the reduction of gradients)" in report
    assert "Records of that micro-batch on rank 1 in cell 4: `r5`, `r7`." in report
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    own = ("--attention", "eager", "--batch-size", "2")
    done, seen = watched(tmp_path, PYTHON, *launch, "train.py", *own, gloo=True)
    assert done.out.count("step 2 first_nonfinite_grad=module.embed.weight") == 2
    assert "in backward of step 2, first in the gradient of layers.1.bias, on rank 1 of 2" in done.err
    assert "records of that batch on rank 1: r5, r7" in done.err
    assert "would have blamed module.embed.weight" in done.err
    assert "after step 2 the weights or the optimizer's state are non-finite" in done.err
    assert (seen["site"]["rank"], seen["site"]["ranks"]["by_reduction"]) == (1, [0])


# accelerate launch -----------------------------------------------------------------------------

ACCELERATE = (
    """
from accelerate import Accelerator
args = arguments()
accelerator = Accelerator()
model = Model(args.attention)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(rows, batch_size=args.batch_size, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
    + LOOP.replace("BACKWARD", "accelerator.backward").replace("CLIP", "accelerator.clip_grad_norm_")
    + "accelerator.end_training()\n"
)
ACCELERATE_MATRIX = (
    """
trainer: accelerate-script
command: [ACCELERATE_BIN, launch, --cpu, --dynamo_backend, "no", train.py, --max-steps, "{steps}"]
steps: 2
settings: {precision: fp32, processes: 1}
"""
    + MATRIX
)


def test_an_accelerate_script_under_accelerate_launch(tmp_path: Path) -> None:
    """One process; the loader fetches one batch ahead, and the right one is named."""
    accelerate = str(Path(PYTHON).with_name("accelerate"))
    programs(tmp_path, ACCELERATE, ACCELERATE_MATRIX.replace("ACCELERATE_BIN", accelerate))
    cell = the_cause(tmp_path, BOTH)
    assert (cell["site"]["step"], cell["site"]["parameters"][0], cell["suspects"]) == (2, "layers.1.bias", ["r2", "r3"])
    launch = ("launch", "--cpu", "--num_processes", "1", "train.py", "--attention", "eager", "--batch-size", "2")
    done, _ = watched(tmp_path, accelerate, *launch)
    assert "step 4" in done.out
    assert "NaN in backward of step 2, first in the gradient of layers.1.bias" in done.err
    assert "records of that batch: r2, r3" in done.err


# a plain script in a virtual environment without nanbisect -------------------------------------

PLAIN = (
    """
args = arguments()
model = Model(args.attention)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(rows, batch_size=args.batch_size, collate_fn=collate)
"""
    + PLAIN_LOOP
)
PLAIN_MATRIX = (
    """
trainer: command
command: [OTHER, train.py, --max-steps, "{steps}"]
steps: 2
env: {PYTHONPATH: ""}
"""
    + MATRIX
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a second environment that has all packages of this one but nanbisect."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for entry in (entry for path in site.getsitepackages() for entry in Path(path).iterdir()):
        if "nanbisect" not in entry.name and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    code = "import importlib.util as i; print(i.find_spec('torch') is not None, i.find_spec('nanbisect') is not None)"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = subprocess.run([python, "-c", code], cwd=folder, env=bare, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "False"]
    return python


def test_a_plain_script_in_an_environment_without_nanbisect(tmp_path: Path, other: Path) -> None:
    """Nothing is installed there: the probe comes with the environment's variables."""
    programs(tmp_path, PLAIN, PLAIN_MATRIX.replace("OTHER", str(other)))
    cell = the_cause(tmp_path, BOTH)
    assert (cell["site"]["step"], cell["site"]["parameters"][0], cell["suspects"]) == (2, "layers.1.bias", ["r2", "r3"])
    done, _ = watched(tmp_path, str(other), "train.py", "--attention", "eager", "--batch-size", "2")
    assert "NaN in backward of step 2, first in the gradient of layers.1.bias" in done.err
    assert "records of that batch: r2, r3" in done.err


# trl sft ---------------------------------------------------------------------------------------

TRL = shutil.which(os.environ.get("TRL", "trl"))
TRL_MATRIX = """
trainer: trl
command: [TRL, sft, --use_cpu, "true"]
model: model
data: data
device: cpu
steps: 2
settings: {precision: fp32, learning_rate: 1e-4, batch_size: 2, gradient_checkpointing: off, optimizer: adamw_torch}
factors:
  param_dtype: [fp32, fp16]
  adam_eps: [1e-4, 1e-8]
"""


def tiny_llama(folder: Path) -> None:
    """A Llama of two layers with a tokenizer of bytes, and a few records, as folders."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    records = [{"prompt": f"Say {number}.", "completion": f"It is {number}."} for number in range(8)]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.skipif(TRL is None, reason="trl is not installed; TRL=path/of/trl names one in another environment")
def test_trl_sft(tmp_path: Path) -> None:
    """Half-precision parameters under an eps that they round to 0: the optimizer divides by 0."""
    tiny_llama(tmp_path)
    (tmp_path / "m.yaml").write_text(TRL_MATRIX.replace("TRL", str(TRL)))
    cell = the_cause(tmp_path, {"param_dtype": ["fp16"], "adam_eps": ["1e-8"]})
    assert (cell["site"]["step"], cell["site"]["phase"]) == (1, "optimizer")
    own = ("--model_name_or_path", "model", "--dataset_name", "data", "--dtype", "float16", "--bf16", "false")
    how = ("--optim", "adamw_torch", "--max_steps", "3", "--logging_steps", "1", "--use_cpu", "true")
    quiet = ("--report_to", "none", "--save_strategy", "no", "--output_dir", "o")
    done, _ = watched(tmp_path, str(TRL), "sft", *own, *how, *quiet)
    assert "in the optimizer of step 1, first in model.embed_tokens.weight, while the loss is finite" in done.err
    assert "the optimizer's own arithmetic made it" in done.err
    assert "`nanbisect init trl` writes a matrix (with `steps: 1`)" in done.err
