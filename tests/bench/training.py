"""One training of the overhead benchmark: a plain AdamW loop that takes a step whenever it is told to.

    python -m tests.bench.training --aid none|anomaly|underflow|naive|trace --tokens 64 --threads 1 [--model FOLDER]

It speaks JSON lines with the benchmark over its standard input and output. What libraries print goes to
standard error, so that they can't disturb the talk. It knows nothing of the probe: that one comes, or
does not, through the environment. Only with `--aid trace` it has each step traced, one after another, which no
user's script would do.
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
from torch.utils._python_dispatch import TorchDispatchMode

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


class Naive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one would write first: ask of every output of every operation whether it is finite."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and look."""
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(each, torch.Tensor) and each.is_floating_point() and not bool(each.isfinite().all()):
                raise RuntimeError(f"{function} is not finite")
        return result


AIDS: dict[str, Callable[[], Any]] = {
    "none": nullcontext, "underflow": nullcontext, "trace": nullcontext,
    "anomaly": torch.autograd.detect_anomaly, "naive": Naive,
}  # fmt: skip


def trace_step(number: int) -> None:
    """Have the probe trace this step."""
    os.environ["NANBISECT_TRACE"] = str(number)
    sys.modules["_nanbisect_probe"].moved(os.environ["NANBISECT_PROBE"])


def operations_seen() -> int:
    """By the trace of the last step."""
    return int(sys.modules["_nanbisect_probe"]._observer.steps.trace.places.count)


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
    parser.add_argument("--aid", choices=tuple(AIDS), required=True)
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
    step, traced = stepper(model, arguments.tokens, AIDS[arguments.aid]), arguments.aid == "trace"
    forget_peak()
    answers.write(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}) + "\n")
    for number, _ in enumerate(sys.stdin, start=1):
        if traced:
            trace_step(number)
        began = time.perf_counter()
        values = step()
        seconds = time.perf_counter() - began
        if traced and operations_seen() < 100:
            raise RuntimeError(f"step {number} was not traced")
        answers.write(json.dumps({"seconds": seconds, "bits": list(map(bits, values)), "peak": peak()}) + "\n")


if __name__ == "__main__":
    main()
