"""A batch as JSON and tensors, and back again: whatever lists, dicts and classes it is made of.

Nothing but data is kept: no class is named by what is loaded. Lists, tuples and dicts are made as such. For
anything else the replay has a batch that the script's own loader has just made (and that is thrown away): it
gives the class, the file gives the values. What holds something else than tensors, numbers and texts can't be
kept, and that is said.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import torch

from .journal import plain
from .numbers import PLAIN
from .tensorfile import Named, storable

DEPTH = 8
SMALL = 1 << 20  # bytes of a tensor that is cloned; of a larger one it is noted whether somebody wrote into it
NONFINITE = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}
Packed = Dict[str, Any]


class Unpackable(Exception):
    """A batch that can't be kept, or not be made again; the message says why."""


class Kept:
    """One batch as the loader gave it. Small tensors are copies; of large ones `changed` tells."""

    def __init__(self, batch: Any) -> None:
        self.tensors: List[Tuple[torch.Tensor, int]] = []  # kept as they are, with their version
        self.leaves: List[Named] = []
        self.reason: str | None = None
        self.packed: Packed = {}
        try:
            self.packed = self._pack(batch, "t", 0)
        except (
            Unpackable,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # no dtype for it
            self.reason = str(error)
            self.leaves = []

    @property
    def problem(self) -> str | None:
        """Why it can't be handed out, or None."""
        if self.reason is None and any(tensor._version != version for tensor, version in self.tensors):
            return "the script changed a batch in place"
        return self.reason

    def _pack(self, value: Any, path: str, depth: int) -> Packed:
        if depth > DEPTH:
            raise Unpackable("a batch is nested too deeply")
        if value is None or type(value) in (bool, int, str):
            return {"value": value}
        if type(value) is float:
            return {"float": plain(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        items = [(key, item, "%s.%d" % (path, index)) for index, (key, item) in _items(value)]
        children = [(key, self._pack(item, name, depth + 1)) for key, item, name in items]
        if type(value) in (list, tuple):
            return {"list": [item for _, item in children], "tuple": type(value) is tuple}
        return {
            "map": [[key, item] for key, item in children],
            "dict": type(value) is dict,
            "class": type(value).__name__,
        }

    def _tensor(self, tensor: torch.Tensor, path: str) -> Packed:
        if type(tensor) not in PLAIN or not storable(tensor):
            raise Unpackable("a batch holds a tensor of a kind that can't be kept (%s)" % type(tensor).__name__)
        if tensor.numel() * tensor.element_size() <= SMALL:
            tensor = tensor.detach().clone()
        else:
            self.tensors.append((tensor, tensor._version))
        self.leaves.append((path, tensor))
        return {"tensor": path}


def _items(value: Any) -> Iterator[Tuple[int, Tuple[Any, Any]]]:
    """(number, (key, item)) of a container. Raises Unpackable for what is none."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return enumerate([("array", torch.from_numpy(value.copy()))])
    if numpy is not None and isinstance(value, numpy.generic):
        return enumerate([("number", value.item())])
    if type(value) in (list, tuple):
        return enumerate((None, item) for item in value)
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return enumerate(list(value.items()))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return enumerate(zip(value._fields, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return enumerate((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    raise Unpackable("a batch holds a %s, which can't be kept" % type(value).__name__)


def unpack(packed: Packed, tensors: Mapping[str, torch.Tensor], name: str, template: Any) -> Any:
    """A batch of the kept values, in the classes of `template`. Raises Unpackable where these are others."""
    if "value" in packed:
        return packed["value"]
    if "float" in packed:
        return NONFINITE.get(packed["float"], packed["float"])
    if "tensor" in packed:
        return _placed(tensors["%s.%s" % (name, packed["tensor"])], template)
    if "list" in packed:
        likes = list(template) if isinstance(template, (list, tuple)) else []
        likes += [likes[-1] if likes else None] * (len(packed["list"]) - len(likes))
        items = [unpack(item, tensors, name, like) for item, like in zip(packed["list"], likes)]
        return tuple(items) if packed["tuple"] else items
    return _mapping(packed, tensors, name, template)


def _placed(tensor: torch.Tensor, template: Any) -> torch.Tensor:
    """A copy of its own, on the device of what the loader has just made, in pinned memory where that is."""
    if not isinstance(template, torch.Tensor):
        return tensor.clone()
    cuda: Any = torch.cuda
    if template.device.type == "cpu":
        return tensor.pin_memory() if cuda.is_initialized() and template.is_pinned() else tensor.clone()
    return tensor.to(template.device)


def _mapping(packed: Packed, tensors: Mapping[str, torch.Tensor], name: str, template: Any) -> Any:
    if not packed["dict"] and type(template).__name__ != packed["class"]:
        raise Unpackable("a batch held a %s, and now holds a %s" % (packed["class"], type(template).__name__))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(template, (numpy.ndarray, numpy.generic)):
        value = unpack(packed["map"][0][1], tensors, name, None)
        return value.numpy() if isinstance(value, torch.Tensor) else type(template)(value)
    made = {key: unpack(item, tensors, name, _part(template, key)) for key, item in packed["map"]}
    if packed["dict"]:
        return made
    if isinstance(template, Mapping):
        return _refilled(template, made)
    if isinstance(template, tuple):
        return type(template)(**made)
    new = copy.copy(template)
    for key, value in made.items():
        object.__setattr__(new, key, value)
    return new


def _refilled(template: Any, made: Dict[Any, Any]) -> Any:
    """A mapping of somebody's class (BatchEncoding, OrderedDict ...): emptied, and filled in the order kept."""
    for key in list(template):
        del template[key]
    for key, value in made.items():
        template[key] = value
    return template


def _part(template: Any, key: Any) -> Any:
    if isinstance(template, Mapping):
        return template.get(key)
    return getattr(template, str(key), None)
