"""Models as a recipe returned them, never trained: a process that stays gives each cell a copy of its own.

A copy is a new module with new parameters, so that nothing which training hung on the last one (hooks,
wrapped forwards, gradients) is there. On the CPU its tensors lie as the loaded ones do, modulo a cache
line: sums depend on it. What can't be copied for certain is loaded again for each cell.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from nanbisect.trainers.sft.view import Settings, read_by

LINE = 64  # bytes, to which memory is aligned as far as arithmetic cares
CHUNK = 1 << 20  # elements that a checksum takes at once
FACTOR, ODD = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)  # odd numbers without a pattern
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

SHARE = 0.25  # of the free memory that held models may take


# random numbers --------------------------------------------------------------------------------


def random_state() -> tuple[Any, ...]:
    """Where the generators of Python, numpy and torch stand, as values that can be compared."""
    import numpy

    state: Any = numpy.random.get_state()
    name, keys, *rest = state
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    torches = tuple(state.numpy().tobytes() for state in (torch.random.get_rng_state(), *cuda))
    return random.getstate(), (name, keys.tobytes(), *rest), torches


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put the generators back to where they stood."""
    import numpy

    python, (name, keys, *rest), torches = state
    random.setstate(python)
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    cpu, *cuda = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in torches)
    torch.random.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


# tensors ---------------------------------------------------------------------------------------


def tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer by name, those that no checkpoint has included, a tied one under each name."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def checksum(model: torch.nn.Module) -> tuple[Any, ...]:
    """Names, shapes and bits of all parameters and buffers. One read of the device."""
    named = tensors_of(model)
    forms = tuple((name, str(t.dtype), tuple(t.shape), t.requires_grad, str(t.device)) for name, t in named)
    sums = {id(t): _bits(t) for _, t in named}
    found = dict(zip(sums, torch.stack([total.cpu() for total in sums.values()]).tolist(), strict=True)) if sums else {}
    return forms, tuple(found[id(tensor)] for _, tensor in named)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over the bits in which every position counts otherwise; int64 arithmetic wraps round."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    whole = flat.view(INTEGERS[flat.element_size()])
    weights = torch.arange(1, min(CHUNK, max(1, whole.numel())) + 1, device=whole.device) * FACTOR | 1
    total = torch.zeros((), dtype=torch.int64, device=whole.device)
    for part in torch.split(whole, CHUNK):
        total = total * ODD + (part.to(torch.int64) * weights[: part.numel()]).sum()
    return total


def _twin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of its own with the same bits; one that will be moved to another device shares them until then."""
    made = tensor.detach() if tensor.device.type != device.type else _copied(tensor.detach())
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor.clone(memory_format=torch.preserve_format)
    size = tensor.numel() * tensor.element_size()
    room = torch.empty(size + LINE, dtype=torch.uint8)
    start = (tensor.data_ptr() - room.data_ptr()) % LINE
    made = room[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return made.copy_(tensor)


# models ----------------------------------------------------------------------------------------


class Base:
    """A loaded model, the settings that its loading read, and where random numbers stood before and after it."""

    def __init__(self, model: torch.nn.Module, settings: Settings, before: tuple[Any, ...]) -> None:
        self.model, self.settings = model, settings
        self.before, self.after = before, random_state()
        self.mark: tuple[Any, ...] | None = None  # of the first copy that was ready to train
        self.versions = [tensor._version for _, tensor in tensors_of(model)]
        self.size = sum(t.numel() * t.element_size() for t in {id(t): t for _, t in tensors_of(model)}.values())

    def serves(self, settings: Settings, now: tuple[Any, ...], adapts: tuple[str, ...]) -> bool:
        """Whether loading would give this model: the same settings read, from the same random numbers.

        `adapts`: what can be set on a loaded model, of a recipe of ours, whose loading is known not to seed: where
        it drew nothing, where random numbers stand does not matter. A user's model() may seed with what was there.
        """
        same = all(settings.peek(name) == self.settings.peek(name) for name in read_by(self.settings) - {*adapts})
        return same and (now == self.before or (bool(adapts) and self.before == self.after))

    def copy(self, device: torch.device) -> torch.nn.Module:
        """A model of its own for one cell."""
        memo: dict[int, Any] = {id(self.settings): self.settings}
        memo |= {id(tensor): _twin(tensor, device) for _, tensor in tensors_of(self.model)}
        return copy.deepcopy(self.model, memo)

    def touched(self) -> bool:
        """Whether a training reached these weights, which were only copied."""
        named = tensors_of(self.model)
        return [t._version for _, t in named] != self.versions or any(t.grad is not None for _, t in named if t.is_leaf)


def copyable(model: torch.nn.Module) -> bool:
    """Whether a deep copy is a model of its own: plain tensors that lie apart, and no function that holds on to it."""
    tensors = list({id(tensor): tensor for _, tensor in tensors_of(model)}.values())
    modules = list(model.modules())
    return all(map(_plain, tensors)) and _apart(tensors) and not any(map(_held_by_function, modules))


def _plain(tensor: torch.Tensor) -> bool:
    hooks = getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None)
    usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    kind = tensor.is_leaf and not tensor.is_quantized and tensor.device.type in ("cpu", "cuda")
    return usual and kind and not hooks and _dense(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.numel() in (0, 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))


def _apart(tensors: list[torch.Tensor]) -> bool:
    """Whether no two tensors share memory: copies would not."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel())
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def _held_by_function(module: torch.nn.Module) -> bool:
    if any(getattr(module, name, None) for name in HOOKS) or "forward" in module.__dict__:
        return True
    functions = [value for value in module.__dict__.values() if isinstance(value, FunctionType)]
    return any(isinstance(held, (torch.nn.Module, torch.Tensor)) for one in functions for held in _closed_over(one))


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            continue


class Bases:
    """The models that this process holds, the latest last; old ones go when memory is short."""

    def __init__(self) -> None:
        self.held: list[Base] = []

    def find(self, settings: Settings, now: tuple[Any, ...], adapts: tuple[str, ...]) -> Base | None:
        """One that serves."""
        return next((base for base in self.held if base.serves(settings, now, adapts)), None)

    def keep(self, base: Base) -> bool:
        """Hold it, if it can be copied and there is memory for it."""
        import psutil

        if not copyable(base.model):
            return False
        room = SHARE * psutil.virtual_memory().available
        while self.held and sum(one.size for one in self.held) + base.size > room:
            del self.held[0]
        self.held += [base] if base.size <= room else []
        return base in self.held
