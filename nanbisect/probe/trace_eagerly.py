"""torch.compile and the trace: a compiled operation shows nothing, so the traced step runs eagerly, and says so."""

from __future__ import annotations

import sys
from typing import Any, Iterable

import torch


class Refused(Exception):
    """The step is compiled, and this torch can't run one step without that."""


class Eagerly:
    """Runs compiled code eagerly from `begin` to `end`. `compiled`: whether there was any that is known."""

    def __init__(self) -> None:
        self.compiled = False
        self.stance: Any = None

    def begin(self, modules: Iterable[torch.nn.Module]) -> None:
        """Raises Refused where compiled code can't be told to run eagerly. Imports nothing that is not there."""
        dynamo = sys.modules.get("torch._dynamo")
        self.compiled = dynamo is not None and (_has_run(dynamo) or any(map(_is_compiled, modules)))
        switch = getattr(torch.compiler, "set_stance", None)
        if switch is not None and dynamo is not None:
            self.stance = switch("force_eager")
        elif self.compiled:
            raise Refused("the training is compiled, and torch %s can't run one step eagerly" % torch.__version__)

    def end(self) -> None:
        """As it was."""
        stance, self.stance = self.stance, None
        if stance is not None:
            stance.__exit__(None, None, None)


def _has_run(dynamo: Any) -> bool:
    counters = getattr(getattr(dynamo, "utils", None), "counters", {})
    return bool(counters.get("frames"))


def _is_compiled(module: torch.nn.Module) -> bool:
    kind = type(module)
    own = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return own or getattr(module, "_compiled_call_impl", None) is not None
