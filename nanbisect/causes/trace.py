"""A trace's `origin` event, read for the rules. Nothing is taken for granted: what is not in it is absent.

Tensors are mappings as the probe writes them: shape, dtype, min, max, absmax (of the finite elements), counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanbisect.outcome import number
from nanbisect.report.words import code

Tensor = Mapping[str, Any]
Link = Mapping[str, Any]
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


@dataclass(frozen=True)
class Trace:
    """The event, or an empty mapping where nothing was traced or found."""

    event: Mapping[str, Any]

    @property
    def origin(self) -> Link:
        """Where it was born. An outcome keeps its fields beside those of the event."""
        return (self.event.get("origin") or {}) if "origin" in self.event else self.event

    @property
    def operation(self) -> str:
        """The origin's, without `aten.`; an empty text without an origin."""
        return short(self.origin)

    @property
    def phase(self) -> str:
        """The origin's."""
        return str(self.origin.get("phase", ""))

    @property
    def kind(self) -> str:
        """What was born: nan, +inf or -inf."""
        return str(self.origin.get("kind", ""))

    @property
    def node(self) -> str:
        """The autograd node at work, without its number: `SqrtBackward`."""
        return str(self.origin.get("node") or "").rstrip("0123456789")

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Of the origin's operation."""
        return self.origin.get("inputs") or ()

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Of the origin's operation."""
        return self.origin.get("outputs") or ()

    @property
    def first_nan(self) -> Link:
        """The link of the chain that made the first NaN; empty where it stayed an Inf."""
        at, chain = self.event.get("nan_at"), self.event.get("chain") or ()
        return chain[at] if at is not None and at < len(chain) else {}

    def born_of_finite(self, *phases: str) -> bool:
        """Whether finite inputs made it, in one of these phases (in any if none is named)."""
        new = self.origin.get("label") == "origin" and all(map(finite, self.inputs))
        return new and (not phases or self.phase in phases)

    @property
    def place(self) -> str:
        """` in layers.0 at model.py:41`, as far as known."""
        module, source = self.origin.get("module"), self.origin.get("source")
        return (f" in {code(module)}" if module else "") + (f" at {code(source)}" if source else "")

    def before(self, count: int, *, phase: str) -> Sequence[Link]:
        """The last operations of a phase before the birth, newest first."""
        return [link for link in reversed(self.event.get("before") or ()) if link.get("phase") == phase][:count]


def short(link: Link) -> str:
    """`_softmax`: the operation of a link."""
    return str(link.get("operation", "")).removeprefix("aten.")


def finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return not any(tensor.get(name) for name in ("nan", "posinf", "neginf"))


def low(tensor: Tensor) -> float:
    """The smallest finite element; NaN where there is none."""
    return _value(tensor, "min")


def high(tensor: Tensor) -> float:
    """The largest finite element; NaN where there is none."""
    return _value(tensor, "max")


def absolute(tensor: Tensor) -> float:
    """The largest finite magnitude; NaN where there is none."""
    return _value(tensor, "absmax")


def all_zero(tensor: Tensor) -> bool:
    """Whether it has elements, and each is zero."""
    return bool(tensor.get("numel")) and finite(tensor) and absolute(tensor) == 0


def ends_at_zero(tensor: Tensor) -> bool:
    """Whether zero is its smallest or its largest element, so that it is certainly there."""
    return 0 in (low(tensor), high(tensor))


def largest(tensor: Tensor) -> float:
    """The largest number of its dtype; Inf for another dtype than the floating ones of training."""
    return LARGEST.get(str(tensor.get("dtype")), math.inf)


def _value(tensor: Tensor, name: str) -> float:
    value = tensor.get(name)
    return math.nan if value is None else number(value)
