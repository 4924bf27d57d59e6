"""Names of parameters and buffers, learnt from the modules that training calls."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Dict, Iterable, List, NamedTuple, Tuple

import torch

from .handles import Handle, Handles

RATES = ("dropout", "attention_dropout", "dropout_p", "attn_pdrop")
UNKNOWN = "?"
FLAT = 4  # names listed of a flat parameter

Pairs = List[Tuple[str, torch.Tensor]]


class Named(NamedTuple):
    """A tensor's name, and the number of the lesson in which it was learnt."""

    name: str
    handle: Handle
    lesson: int


Table = Dict[int, Named]


class Names:
    """id -> name, in order of registration, over all modules learnt so far."""

    def __init__(self, handles: Handles) -> None:
        self.handles = handles
        self.parameters: Table = {}
        self.buffers: Table = {}
        self.gathered: Table = {}  # FSDP2's unsharded parameters: leaves of the graph, and empty most of the time
        self.tied: dict[str, list[str]] = {}
        self.lessons = 0
        self.modules: list[weakref.ref[torch.nn.Module]] = []

    def learn(self, module: torch.nn.Module, *, rename: bool = False) -> tuple[Pairs, Pairs]:
        """Take a module's names; returns its parameters and buffers that had none.

        The first name of a tied one stays. A part of a module that is known keeps its longer names.
        """
        parameters, buffers = list(module.named_parameters()), list(module.named_buffers())
        new = [[(name, tensor) for name, tensor in pairs if not self.named(tensor)] for pairs in (parameters, buffers)]
        if rename or new[0] or new[1]:
            self.lessons += 1
            self.modules.append(weakref.ref(module))
            self.parameters = self._merged(self.parameters, parameters)
            self.buffers = self._merged(self.buffers, buffers)
            self._learn_tied(module)
        return new[0], new[1]

    def buffers_now(self) -> Pairs:
        """(name, buffer) of the modules learnt, as they are now: a forward may put another tensor in its place."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for reference in reversed(self.modules):
            module = reference()
            for name, tensor in self._buffers_of(module) if module is not None else ():
                found.setdefault(id(tensor), (name, tensor))
        return list(found.values())

    def _buffers_of(self, module: torch.nn.Module) -> Pairs:
        """The module's buffers with their names: those known, or, if one is not, as the module says."""
        held = held_buffers(module)
        entries = [self.buffers.get(id(tensor)) for tensor in held]
        if all(entry is not None and entry.handle() is tensor for entry, tensor in zip(entries, held)):
            return [(entry.name, tensor) for entry, tensor in zip(entries, held) if entry is not None]
        return list(module.named_buffers())

    def _merged(self, table: Table, pairs: Iterable[tuple[str, torch.Tensor]]) -> Table:
        fresh = {id(tensor): Named(name, self.handles.of(tensor), self.lessons) for name, tensor in pairs}
        kept = {key: named for key, named in table.items() if key not in fresh and named.handle() is not None}
        return {**kept, **fresh}

    def _learn_tied(self, module: torch.nn.Module) -> None:
        for name, tensor in module.named_parameters(remove_duplicate=False):
            first = self.name(tensor)
            if name != first and name not in self.tied.get(first, ()):
                self.tied.setdefault(first, []).append(name)

    def _entry(self, tensor: torch.Tensor) -> Named | None:
        for table in (self.parameters, self.buffers):
            entry = table.get(id(tensor))
            if entry is not None and entry.handle() is tensor:
                return entry
        return None

    def name(self, tensor: torch.Tensor) -> str:
        """The tensor's name, or "?" for one that no known module holds."""
        entry = self._entry(tensor)
        if entry is not None:
            return entry.name
        gathered = self.gathered.get(id(tensor))
        if gathered is not None and gathered.handle() is tensor:
            return gathered.name
        return _flat(getattr(tensor, "_fqns", ()))

    def gather(self, path: str, module: torch.nn.Module) -> None:
        """Learn what stands in for a module's parameters while it works."""
        for key, tensor in module._parameters.items():
            if tensor is not None and self.name(tensor) == UNKNOWN:
                name = "%s.%s" % (path, key) if path else key
                self.gathered[id(tensor)] = Named(name, self.handles.of(tensor), self.lessons)

    def named(self, tensor: torch.Tensor) -> bool:
        """Whether a known module holds it."""
        return self._entry(tensor) is not None

    def in_one(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one module gave all of them their names; else two of them may have the same."""
        entries = [self._entry(tensor) for tensor in tensors]
        return None not in entries and len({entry.lesson for entry in entries if entry is not None}) <= 1

    def live(self, table: Table) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of everything still alive, in order of registration."""
        pairs = ((named.name, named.handle()) for named in list(table.values()))
        return [(name, tensor) for name, tensor in pairs if tensor is not None]

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """(name, gradient) of every parameter that has one, in order of registration."""
        pairs = ((name, parameter.grad) for name, parameter in self.live(self.parameters))
        return [(name, grad) for name, grad in pairs if grad is not None]


def held_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Buffers of a module and its parts, in the order of `named_buffers`, which takes ten times as long."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    stack: list[torch.nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if part._buffers:
            found.update((id(tensor), tensor) for tensor in part._buffers.values() if tensor is not None)
        if part._modules:
            stack.extend(reversed(part._modules.values()))
    return list(found.values())


def _flat(names: Iterable[str]) -> str:
    """The name of FSDP1's flat parameter, which holds many; "?" for any other tensor."""
    known = list(names)
    more = ", ..." if len(known) > FLAT else ""
    return "flat(%s%s)" % (", ".join(known[:FLAT]), more) if known else UNKNOWN


def sharded_paths(module: torch.nn.Module) -> dict[int, str]:
    """id -> path of the modules that hold parameters, where FSDP2 swaps these; else nothing."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not any(isinstance(part, kind) for part in module.modules()):
        return {}
    return {id(part): path for path, part in module.named_modules() if part._parameters}


def unsaved(module: torch.nn.Module) -> set[int]:
    """ids of buffers that no checkpoint holds: code makes them, or leaves what was in the memory before."""
    owned = ((part._buffers, name) for part in module.modules() for name in part._non_persistent_buffers_set)
    return {id(buffers[name]) for buffers, name in owned if buffers.get(name) is not None}


def smallest_holder(leaves: Iterable[torch.Tensor]) -> torch.nn.Module | None:
    """The smallest module alive that holds all leaves (a script may never call it)."""
    wanted = {id(leaf) for leaf in leaves}
    best: tuple[int, int, torch.nn.Module] | None = None
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.nn.Module):
            continue
        try:
            held, parts = {id(parameter) for parameter in thing.parameters()}, sum(1 for _ in thing.modules())
        except Exception:  # noqa: BLE001 - a half-built module, or a user's own `parameters`
            continue
        if wanted <= held and (best is None or (len(held), parts) < best[:2]):
            best = (len(held), parts, thing)
    return best[2] if best is not None else None


def dropout_active(module: torch.nn.Module) -> bool:
    """Whether any submodule drops activations while training (random masks make runs differ)."""
    return any(part.training and _rate(part) > 0 for part in module.modules())


def _rate(part: torch.nn.Module) -> float:
    names = (*RATES, "p") if isinstance(part, torch.nn.modules.dropout._DropoutNd) else RATES
    values = [getattr(part, name, 0) for name in names]
    return max(float(value) if isinstance(value, (int, float)) else 0.0 for value in values)
