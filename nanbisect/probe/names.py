"""Names of parameters and buffers, learnt from the modules that training calls.

Nothing is stored on a tensor: an attribute on a parameter would be written into the user's
checkpoint. An id may be used again, so a weak reference stands beside it.
"""

from __future__ import annotations

import gc
import weakref

import torch


class Names:
    """id -> name, in order of registration, over all modules learnt so far."""

    def __init__(self):
        self.parameters = {}
        self.buffers = {}
        self.tied = {}

    def learn(self, module):
        """Take the names of a module's parameters and buffers; the first name of a tied one stays."""
        for name, tensor in module.named_parameters():
            self.parameters[id(tensor)] = (name, weakref.ref(tensor))
        for name, tensor in module.named_buffers():
            self.buffers[id(tensor)] = (name, weakref.ref(tensor))
        for name, tensor in module.named_parameters(remove_duplicate=False):
            first = self.name(tensor)
            if name != first:
                self.tied.setdefault(first, []).append(name)

    def name(self, tensor):
        """The tensor's name, or "?" for one that no known module holds."""
        for table in (self.parameters, self.buffers):
            entry = table.get(id(tensor))
            if entry is not None and entry[1]() is tensor:
                return entry[0]
        return "?"

    def knows(self, tensors):
        """Whether all of them have a name."""
        return all(self.name(tensor) != "?" for tensor in tensors)

    def live(self, table):
        """(name, tensor) of everything still alive, in order of registration."""
        pairs = ((name, ref()) for name, ref in list(table.values()))
        return [(name, tensor) for name, tensor in pairs if tensor is not None]

    def search(self, leaves):
        """Learn from the smallest module alive that holds all leaves (a script may never call it)."""
        wanted = {id(leaf) for leaf in leaves}
        best = None
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.nn.Module):
                continue
            held = {id(parameter) for parameter in thing.parameters()}
            if wanted <= held and (best is None or len(held) < best[0]):
                best = (len(held), thing)
        if best is not None:
            self.parameters, self.buffers, self.tied = {}, {}, {}
            self.learn(best[1])
        return best[1] if best else None


def dropout_active(module):
    """Whether any submodule drops activations while training (random masks make runs differ)."""
    for part in module.modules():
        rate = getattr(part, "p", 0) if isinstance(part, torch.nn.modules.dropout._DropoutNd) else 0
        for name in ("attention_dropout", "dropout_p", "attn_pdrop"):
            value = getattr(part, name, 0)
            rate = max(rate, value) if isinstance(value, (int, float)) else rate
        if rate and part.training:
            return True
    return False
