"""Weak holds on tensors: one a tensor, kept in one place.

Nothing is stored on a tensor (an attribute on a parameter would be written into the user's checkpoint)
and nothing keeps it alive. An id may be used again, so a weak reference stands beside it; and torch
refuses to swap a tensor that has weak references (`Module.to` of tensor subclasses), so they can be
taken away for that moment.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from typing import Callable, Iterator

import torch

Callback = Callable[["weakref.ref[torch.Tensor]"], None]


class Handle:
    """A weak hold on one tensor; called, it gives the tensor or None. `hooked`: our gradient hook is on it."""

    __slots__ = ("hooked", "reference")

    def __init__(self, tensor: torch.Tensor, gone: Callback) -> None:
        self.reference: weakref.ref[torch.Tensor] | None = weakref.ref(tensor, gone)
        self.hooked = False

    def __call__(self) -> torch.Tensor | None:
        return None if self.reference is None else self.reference()


class Handles:
    """id -> handle of every tensor that the probe knows; entries go with their tensors."""

    def __init__(self) -> None:
        self.table: dict[int, Handle] = {}

    def of(self, tensor: torch.Tensor) -> Handle:
        """The tensor's handle, the same one every time."""
        handle = self.table.get(id(tensor))
        if handle is None or handle() is not tensor:
            handle = self.table[id(tensor)] = Handle(tensor, self._gone(id(tensor)))
        return handle

    def _gone(self, key: int) -> Callback:
        def gone(reference: weakref.ref[torch.Tensor]) -> None:
            handle = self.table.get(key)
            if handle is not None and handle.reference is reference:
                del self.table[key]

        return gone

    @contextlib.contextmanager
    def released(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Within it no weak reference of ours is on these tensors, whose contents are swapped meanwhile.

        Hooks go with the contents, but the table of hooks that Python shows stays, unconnected: a new one
        is needed for ours to be registered again.
        """
        held = [(self.table[id(tensor)], tensor) for tensor in tensors if id(tensor) in self.table]
        for handle, _ in held:
            handle.reference = None
        try:
            yield
        finally:
            for handle, tensor in held:
                if handle.hooked:
                    tensor._post_accumulate_grad_hooks = OrderedDict()
                handle.reference, handle.hooked = weakref.ref(tensor, self._gone(id(tensor))), False
