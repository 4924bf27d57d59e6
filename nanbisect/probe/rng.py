"""The state of every random generator that a training may draw from: taken, packed for JSON, put back."""

from __future__ import annotations

import random
import sys
from typing import Any, Dict, List, Tuple

import torch

from .tensorfile import Named

CUDA: Any = torch.cuda
State = Dict[str, Any]  # torch: tensor, cuda: list of tensors, python: tuple, numpy: tuple


def take() -> State:
    """As it is now, cloned. Draws nothing; some 0.2 ms, most of them numpy's, where that is imported."""
    state: State = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if CUDA.is_initialized():
        state["cuda"] = CUDA.get_rng_state_all()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state["numpy"] = numpy.random.get_state()
    return state


def put(state: State) -> None:
    """Set the generators; those of devices or libraries that are not here are left alone."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if state.get("cuda") and CUDA.is_initialized():
        for index, each in enumerate(state["cuda"][: CUDA.device_count()]):
            CUDA.set_rng_state(each, index)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and state.get("numpy") is not None:
        numpy.random.set_state(tuple(state["numpy"]))


def pack(state: State, name: str) -> Tuple[Dict[str, Any], List[Named]]:
    """A state as JSON, and its tensors by name."""
    tensors: List[Named] = [(name + ".torch", state["torch"])]
    tensors += [("%s.cuda.%d" % (name, index), each) for index, each in enumerate(state.get("cuda", ()))]
    whole: Dict[str, Any] = {"name": name, "cuda": len(state.get("cuda", ()))}
    version, words, gauss = state["python"]
    whole["python"] = [version, list(words), gauss]
    if state.get("numpy") is not None:
        kind, keys, position, has_gauss, cached = state["numpy"]
        whole["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return whole, tensors


def unpack(whole: Dict[str, Any], tensors: Dict[str, torch.Tensor]) -> State:
    """The inverse of `pack`."""
    name = whole["name"]
    state: State = {"torch": tensors[name + ".torch"], "python": whole["python"]}
    state["cuda"] = [tensors["%s.cuda.%d" % (name, index)] for index in range(whole["cuda"])]
    if "numpy" in whole:
        numpy: Any = sys.modules.get("numpy")
        kind, keys, *rest = whole["numpy"]
        state["numpy"] = None if numpy is None else (kind, numpy.array(keys, dtype=numpy.uint32), *rest)
    return state
