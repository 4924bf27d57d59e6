"""The hooks that look at each gradient as it is accumulated, and at each use of a tied weight by itself.

They run once a parameter in every backward, between kernels that have just filled the caches: what they
touch, they fetch again. So a finite gradient on the CPU, the case of nearly all, has a short way of its own.
"""

from __future__ import annotations

import time
from typing import Any, Callable

import torch

from . import numbers
from .graph import Walk
from .handles import Handle, Handles
from .phase import compiling, graph_task
from .steps import Steps
from .window import Clock, Flag

USES = 16  # uses of one tensor looked at one by one; a recurrent weight has hundreds


class Arrivals:
    """Flags what arrives non-finite (or can't be told here) for the reading at the end of the step."""

    def __init__(self, steps: Steps, handles: Handles, clock: Clock) -> None:
        self.steps = steps
        self.handles = handles
        self.clock = clock
        # (backward call, tied weight) -> its last use and that use's gradient, until the sum is there
        self.held: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
        self.plain_register: Any = torch.Tensor.register_post_accumulate_grad_hook
        self.guarded_arrived: Callable[[torch.Tensor], Any] = self.arrived
        self.guarded_use: Callable[..., Any] = self.use_arrived
        self.noted: Callable[..., Any] | None = None  # the trace's

    def hook(self, leaf: torch.Tensor) -> bool:
        """Look at this leaf's gradient whenever it is accumulated; ours is the first hook of all. Whether it is new."""
        handle = self.handles.of(leaf)
        if handle.hooked or not (leaf.is_leaf and leaf.requires_grad):
            return False
        handle.hooked = True
        self.plain_register(leaf, self.quick)
        return True

    def quick(self, leaf: torch.Tensor) -> None:
        """A gradient was accumulated into `leaf`: the short way for a finite one, else the whole one.

        The books are kept before the sum: behind it, every line of them would be fetched from memory.
        """
        if compiling():
            return
        began, clock, tied = time.perf_counter(), self.clock, self.held
        grad, handle = leaf.grad, self.handles.table.get(id(leaf))
        if grad is None or handle is None or handle() is not leaf or not numbers.summable(grad):
            self.guarded_arrived(leaf)
            return
        window = self.steps.window
        window.leaves[id(handle)] = handle
        window.fine += 1
        if numbers.finite_sum(grad):
            clock.seconds += time.perf_counter() - began
            if tied:  # after the clock: torch would have freed this gradient at this moment, and that takes long
                self._release(handle)
        else:
            window.fine -= 1
            self.guarded_arrived(leaf)

    def arrived(self, leaf: torch.Tensor) -> None:
        """The whole way."""
        handle, window = self.handles.of(leaf), self.steps.window
        use = self._release(handle)
        found = None if leaf.grad is None else numbers.look(leaf.grad)
        if found is None:
            return
        if self.noted is not None and leaf.grad is not None:
            self.noted("gradient", leaf.grad, window.micro_batch, leaf)
        if use is not None:
            self._flag(handle, *use)
        window.leaves[id(handle)] = handle
        window.flags.append(Flag(window.micro_batch, handle, None, found))

    # uses --------------------------------------------------------------------------------------

    def hook_uses(self, leaf: torch.Tensor, walk: Walk) -> list[Any]:
        """Each use of a tied weight by itself: the sum in `.grad` can't be told apart afterwards."""
        uses = walk.uses.get(id(leaf), ())
        if not 1 < len(uses) <= USES:
            return []
        handle, missing = self.handles.of(leaf), [len(uses)]
        return [node.register_hook(self._look(handle, index, walk.use_name(node), missing)) for node, index in uses]

    def _look(self, handle: Handle, index: int, use: str, missing: list[int]) -> Callable[[Any, Any], None]:
        guarded_use = self.guarded_use

        def look(grad_inputs: Any, _: Any) -> None:
            missing[0] -= 1
            guarded_use(handle, use, grad_inputs[index], not missing[0])

        return look

    def use_arrived(self, handle: Handle, use: str, grad: torch.Tensor | None, last: bool) -> None:
        """One use of a tied weight gave its share of the gradient.

        The sum arrives right after the last one: that one is kept for the moment, and needs no look if the sum is
        finite. (On a device the look is a kernel that nobody waits for.)
        """
        if grad is not None and last and grad.is_cpu:
            self.held[graph_task(), id(handle)] = (use, grad)
        elif grad is not None:
            self._flag(handle, use, grad)

    def _release(self, handle: Handle) -> tuple[str, torch.Tensor] | None:
        return self.held.pop((graph_task(), id(handle)), None)

    def _flag(self, handle: Handle, use: str, grad: torch.Tensor) -> None:
        found = numbers.look(grad)
        if found is not None and found is not numbers.FINITE:
            window = self.steps.window
            window.flags.append(Flag(window.micro_batch, handle, use, found))
