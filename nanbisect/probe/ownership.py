"""Which optimizer moves which parameters, and what state it keeps for them."""

from __future__ import annotations

from typing import Any, Iterable

import torch

from .names import Names
from .window import Bad, Window


def owned(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The parameters that an optimizer moves."""
    return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]


def others(bad: list[Bad], optimizer: torch.optim.Optimizer | None) -> list[Bad]:
    """Those whose parameters this optimizer does not move; none if there is no optimizer to ask."""
    if optimizer is None or not bad:
        return []
    moved = {id(parameter) for parameter in owned(optimizer)}
    return [item for item in bad if id(item.handle()) not in moved]


def without_gradient(optimizer: torch.optim.Optimizer, names: Names, window: Window) -> list[str]:
    """Named parameters of this optimizer that require a gradient and got none (FSDP gives some ranks empty ones)."""
    got = {id(handle()) for handle in list(window.leaves.values())}
    lost = [p for p in owned(optimizer) if p.requires_grad and p.grad is None and id(p) not in got and p.numel()]
    return [names.name(parameter) for parameter in lost if names.named(parameter)]


def state_of(optimizers: Iterable[Any], names: Names) -> list[tuple[str, torch.Tensor]]:
    """(parameter.key, tensor) of all state kept per parameter."""
    pairs: list[tuple[str, torch.Tensor]] = []
    for optimizer in list(optimizers):
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, torch.Tensor) and isinstance(state, dict):
                name = names.name(parameter)
                pairs += [("%s.%s" % (name, key), v) for key, v in state.items() if isinstance(v, torch.Tensor)]
    return pairs
