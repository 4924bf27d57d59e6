"""A pretrained model read once: the server of warm starts loads it, its children have it without reading.

A child's copy is its own: forked memory is copied when written. Tensors stay where loading put them, often
in the mapped file, so that they are aligned as in a cold start (sums depend on it). Only what gives the
child the very model and random state that loading gives is held: a local folder, no weights missing from
the checkpoint, no random number drawn, no code of the checkpoint's own, and memory for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HELD: dict[tuple[str, str], Any] = {}
SHARE = 0.25  # of the free memory that the weights may take
SAFE = "eager"  # every model knows it; another one is set on the loaded model


def argument(model: str, param_dtype: str) -> str:
    """What `prepare` is to be given: everything that changes loading."""
    return json.dumps({"model": model, "param_dtype": param_dtype})


def prepare(text: str) -> None:
    """In the server: load the model and keep it. Whatever goes wrong is the child's to meet again."""
    import torch

    from nanbisect.trainers.sft.recipes import causal_lm

    asked = json.loads(text)
    if not _fits(Path(asked["model"])):
        return
    before = torch.random.get_rng_state()
    try:
        with _one_thread():
            model, info = causal_lm.pretrained(asked["model"], SAFE, asked["param_dtype"], output_loading_info=True)
        drawn = not torch.equal(before, torch.random.get_rng_state())
        if not drawn and not info["missing_keys"] and hasattr(model, "set_attn_implementation"):
            HELD[asked["model"], asked["param_dtype"]] = model
    except Exception:  # noqa: BLE001 - transformers and safetensors raise anything
        HELD.clear()
    finally:
        torch.random.set_rng_state(before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A process with threads can't be forked: neither torch's for maths, nor the one that watches progress bars."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    threads, interval = torch.get_num_threads(), tqdm.monitor_interval
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        tqdm.monitor_interval = interval


def take(model: str, implementation: str, param_dtype: str) -> Any:
    """The held model with this attention, or None. Raises what transformers says of an attention it lacks."""
    found = HELD.pop((model, param_dtype), None)
    if found is not None:
        found.set_attn_implementation(implementation)
    return found if found is not None and found.config._attn_implementation == implementation else None


def _fits(folder: Path) -> bool:
    import psutil

    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return 0 < size < SHARE * psutil.virtual_memory().available
