"""One training of the overhead benchmark: a plain AdamW loop that takes a step whenever it is told to.

    python -m tests.bench.training --aid none|anomaly|underflow --tokens 64 --threads 1 [--model FOLDER] [--toy]

It speaks JSON lines with the benchmark over its standard input and output. What libraries print goes to
standard error, so that they can't disturb the talk. It knows nothing of the probe: that one comes, or
does not, through the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

SIZE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
TOY = {**SIZE, "hidden_size": 72, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 256}
LENGTH = 256  # tokens of a record; a step of fewer is one record


def model_of(folder: str | None, *, toy: bool) -> Any:
    """SmolLM2-135M from its folder, or a random model of that shape (or a toy), in bf16."""
    if folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    config = transformers.LlamaConfig(**(TOY if toy else SIZE))
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def batches(tokens: int, vocabulary: int) -> Iterator[torch.Tensor]:
    """Random token ids of shape (records, length), the same in every training."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(1, tokens // LENGTH), min(tokens, LENGTH))
    while True:
        yield torch.randint(0, vocabulary, shape, generator=generator)


def stepper(model: Any, tokens: int, context: Callable[[], Any]) -> Callable[[], list[torch.Tensor]]:
    """The loop's body: forward, backward, clip, AdamW. Returns the loss and the norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stream = batches(tokens, model.config.vocab_size)

    def step() -> list[torch.Tensor]:
        ids = next(stream)
        with context():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), norm]

    return step


def bits(value: torch.Tensor) -> str:
    """A number as its bits."""
    return value.reshape(1).view(torch.uint8).numpy().tobytes().hex()


def forget_peak() -> None:
    """Let the peak be that of the training, not of the loading, where the system can (Linux)."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def peak() -> int:
    """Peak bytes of this process."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Load, say so, then a step a line until there are no more lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--aid", choices=("none", "anomaly", "underflow"), required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--model")
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = model_of(arguments.model, toy=arguments.toy).train()
    if arguments.aid == "underflow":
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(model)
    anomaly = arguments.aid == "anomaly"
    step = stepper(model, arguments.tokens, torch.autograd.detect_anomaly if anomaly else nullcontext)
    forget_peak()
    answers.write(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}) + "\n")
    for _ in sys.stdin:
        began = time.perf_counter()
        values = step()
        seconds = time.perf_counter() - began
        answers.write(json.dumps({"seconds": seconds, "bits": list(map(bits, values)), "peak": peak()}) + "\n")


if __name__ == "__main__":
    main()
