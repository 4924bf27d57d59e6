"""Which channel's loss brings it: each one's backward by itself, on the micro-batch that failed.

It is done in an attempt of its own, which ends there: the graph is kept from one channel to the next, and no
trace of another attempt is touched by it.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from nanbisect.trainers.sft.losses import terms

WANTED = "NANBISECT_ALONE"  # the step as the probe counts, and the micro-batch: 3:0


class ChannelsAlone:
    """Looks at each gradient as it arrives: a loop without an optimizer frees it at once."""

    def __init__(self, model: torch.nn.Module, step: int, micro: int) -> None:
        self.model = model
        self.step, self.micro = step, micro
        self.bad: str | None = None
        self.at_work = False
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @classmethod
    def wanted(cls, model: torch.nn.Module) -> ChannelsAlone | None:
        """As the environment asks; None in any other attempt."""
        step, _, micro = os.environ.get(WANTED, "").partition(":")
        return cls(model, int(step), int(micro)) if step.isdigit() and micro.isdigit() else None

    def due(self, steps: Any) -> bool:
        """Whether this is the micro-batch; its loss is the last of `steps`."""
        return bool(steps.number == self.step and len(steps.micro) - 1 == self.micro)

    def tell(self, steps: Any, accelerator: Any, accumulation: int) -> dict[str, Any]:
        """Channel -> nan, +inf, -inf or None: the first kind that its gradients showed, or its loss."""
        found: dict[str, str | None] = {}
        self.at_work = True
        for name, term in terms(steps.micro[-1]).items():
            self._clear()
            self.bad = kind_of(term)
            if term.requires_grad:
                accelerator.backward(term / accumulation, retain_graph=True)
            found[name] = self.bad
        self._clear()
        return {**steps.place, "micro_batch": self.micro, "channels": found}

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self.at_work and self.bad is None and parameter.grad is not None:
            self.bad = kind_of(parameter.grad)


def kind_of(tensor: torch.Tensor) -> str | None:
    """nan, +inf, -inf, or None for finite values."""
    values = tensor.detach().float()
    if bool(values.isnan().any()):
        return "nan"
    if bool(values.isposinf().any()):
        return "+inf"
    return "-inf" if bool(values.isneginf().any()) else None
