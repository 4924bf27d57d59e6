"""A capsule: all that one step needs to be computed again, written when a non-finite value has surfaced.

Gradients are judged before the optimizer moves anything, so at that moment parameters and optimizer state are
still those of the failing step; only buffers and random state have moved, and of these (and of the batches that
loaders served) copies were taken as the step began. A capsule is a folder a rank: an index in JSON, and the
tensors beside it. It is whole or not there, and it is not written if the disk has no room for it.

Where no capsule is wanted, none of this exists: every caller asks for `None` first.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import weakref
import zlib
from collections import deque
from typing import Any, Deque, Dict, Iterable, Iterator, List, NamedTuple, Tuple

import torch

from . import inputs, rng, tensorfile
from .batches import Forward
from .journal import line, rank, world
from .names import Names, held_buffers
from .packing import Kept
from .tensorfile import Named

SCHEMA = 1
INDEX, TENSORS = "capsule.json", "tensors.safetensors"
SERVED = 256  # batches kept: a window of the Trainer's, and what loaders fetch ahead
BYTES = 1 << 28  # of copies of batches; those of the step under way are kept in any case
SMALL = 1 << 20  # bytes of a buffer that is cloned every step: some kernels write without a trace
FORWARDS = 128  # of a step, of which random state and inputs are known
SPARE = 1 << 26  # bytes left free on the disk

Reason = str


class Served(NamedTuple):
    """A batch that a loader gave, with the random state at that moment. `kind` tells loaders apart."""

    kind: str
    kept: Kept
    marks: List[inputs.Mark]
    random: rng.State
    size: int


class Held(NamedTuple):
    """A buffer as it was when the step began."""

    reference: "weakref.ref[torch.Tensor]"
    version: int
    values: torch.Tensor


class Unfit(Exception):
    """Why no capsule can be written."""


def kind_of(iterator: Any) -> str:
    """What tells a loader's iterator from another's, in another process too: its dataset's class and length."""
    dataset = getattr(iterator, "_dataset", None)
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        size = -1
    return "%s.%s %d" % (type(dataset).__module__, type(dataset).__qualname__, size)


class Recorder:
    """Keeps what the step under way began with, and writes the capsule at the first event."""

    def __init__(self, folder: str, names: Names) -> None:
        self.folder = folder
        self.names = names
        self.served: Deque[Served] = deque(maxlen=SERVED)
        self.total = 0  # batches served so far
        self.buffers: Dict[int, Held] = {}
        self.optimizers: List[Any] = []  # weak, in the order of their first step
        self.scalers: List[Any] = []  # weak, in the order of their making
        self.written = False
        self.begin()

    def begin(self) -> None:
        """A step is over: the next forward is the first of another one."""
        self.forwards: List[Tuple[Forward, rng.State]] = []
        self.first = 0  # batches served before the step's first forward
        self.moved = False
        self.unfit: Reason | None = None

    # while the training goes on ----------------------------------------------------------------

    def serve(self, iterator: Any, batch: Any) -> None:
        """A loader gives a batch."""
        if self.written:
            return
        kept = Kept(batch)
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in kept.leaves)
        marks = inputs.marks(inputs.tensors(batch) or {})
        self.served.append(Served(kind_of(iterator), kept, marks, rng.take(), size))
        self.total += 1
        while len(self.served) > 1 and self.total - len(self.served) < self.first and self._bytes() > BYTES:
            self.served.popleft()

    def _bytes(self) -> int:
        return sum(each.size for each in self.served)

    def forward(self, forward: Forward, *, stepping: bool) -> None:
        """A training forward of a root is about to start; the first of a step keeps the buffers."""
        if self.written:
            return
        if stepping:
            self.unfit = "the optimizer calls the model itself"
        if not self.forwards:
            self.first = self.total
            self._keep_buffers()
        if len(self.forwards) < FORWARDS:
            self.forwards.append((forward, rng.take()))

    def _keep_buffers(self) -> None:
        """Small ones every time; of a large one a copy is made anew only if somebody wrote into it."""
        before, self.buffers = self.buffers, {}
        for module in filter(None, (reference() for reference in self.names.modules)):
            for tensor in held_buffers(module):
                held = before.get(id(tensor))
                same = held is not None and held.reference() is tensor and held.version == tensor._version
                if held is None or not same or tensor.numel() * tensor.element_size() <= SMALL:
                    held = Held(weakref.ref(tensor), tensor._version, tensor.detach().clone())
                self.buffers[id(tensor)] = held

    def met(self, optimizer: Any) -> None:
        """An optimizer is about to step for the first time."""
        self.optimizers.append(weakref.ref(optimizer))

    # at the event ------------------------------------------------------------------------------

    def event(self, step: int, micro: int, roots: Iterable[Any]) -> Dict[str, Any] | None:
        """Write the capsule, once. Returns what to say of it: the fields of a `capsule` event."""
        if self.written:
            return None
        self.written = True
        began = time.perf_counter()
        size = 0
        try:
            index, tensors = self._gather(step, micro, [root for root in roots if root is not None])
            size = tensorfile.size_of(tensors)
            self._write(index, tensors, size)
        except (Unfit, OSError) as error:
            text = str(error) if isinstance(error, Unfit) else "it can't be written: %s" % error
            return self._told(step, micro, size, began, text)
        finally:
            self._release()
        return self._told(step, micro, size, began, None)

    def _told(self, step: int, micro: int, size: int, began: float, reason: Reason | None) -> Dict[str, Any]:
        seconds = time.perf_counter() - began
        whole = {"step": step, "micro_batch": micro, "rank": rank(), "written": reason is None}
        return {**whole, "reason": reason, "bytes": size, "seconds": seconds}

    def _release(self) -> None:
        """What was held for it is of no use any more."""
        self.served.clear()
        self.buffers.clear()
        self.forwards.clear()

    def _gather(self, step: int, micro: int, roots: List[torch.nn.Module]) -> Tuple[Dict[str, Any], List[Named]]:
        """The index and all tensors. Raises Unfit."""
        if self.moved:
            raise Unfit("it surfaced after the optimizer had moved the parameters")
        if self.unfit is not None:
            raise Unfit(self.unfit)
        if not self.forwards:
            raise Unfit("no forward of the step was seen")
        tensors: List[Named] = []
        index = {
            "schema": SCHEMA, "step": step, "micro_batch": micro, "rank": rank(), "world": world(),
            "torch": str(torch.__version__), "roots": self._roots(roots, tensors),
            "served": self._batches(tensors), "forwards": self._forwards(tensors),
            "optimizers": [_optimizer(each, "optimizer.%d" % place, tensors) for place, each in self._alive()],
            "scalers": [_plain(scaler.state_dict()) for scaler in self._scalers()],
        }  # fmt: skip
        return index, tensors

    def _alive(self) -> Iterator[Tuple[int, Any]]:
        return enumerate(each for each in (reference() for reference in self.optimizers) if each is not None)

    def _scalers(self) -> List[Any]:
        return [scaler for scaler in (reference() for reference in self.scalers) if scaler is not None]

    def _roots(self, roots: List[torch.nn.Module], tensors: List[Named]) -> List[Dict[str, Any]]:
        """Parameters and buffers of every module that training calls; what two of them share is kept once."""
        keys: Dict[int, str] = {}
        found = []
        for place, module in enumerate(roots):
            parts: Dict[str, List[List[Any]]] = {}
            for what, pairs in (("parameters", module.named_parameters()), ("buffers", module.named_buffers())):
                parts[what] = []
                for name, tensor in pairs:
                    if not tensorfile.storable(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                        raise Unfit("%s is sharded, offloaded or of a kind that can't be kept" % name)
                    if id(tensor) not in keys:
                        keys[id(tensor)] = "root.%d.%s" % (place, name)
                        tensors.append((keys[id(tensor)], self._as_it_was(name, tensor, what)))
                    parts[what].append([name, keys[id(tensor)]])
            found.append({"class": type(module).__name__, **parts})
        return found

    def _as_it_was(self, name: str, tensor: torch.Tensor, what: str) -> torch.Tensor:
        held = self.buffers.get(id(tensor))
        if what == "parameters":
            return tensor
        if held is None or held.reference() is not tensor:
            raise Unfit("the buffer %s was put in its place during the step" % name)
        return held.values

    def _batches(self, tensors: List[Named]) -> List[Dict[str, Any]]:
        """Those of the step and what was fetched ahead, from the one that the first forward worked on."""
        rows = []
        for place, each in enumerate(list(self.served)[self._first_served() :]):
            if each.kept.problem is not None:
                raise Unfit(each.kept.problem)
            name = "served.%d" % place
            tensors += [("%s.%s" % (name, path), tensor) for path, tensor in each.kept.leaves]
            state, states = rng.pack(each.random, name + ".random")
            tensors += states
            rows.append({"kind": each.kind, "name": name, "batch": each.kept.packed, "random": state})
        return rows

    def _first_served(self) -> int:
        """The latest of those that share most content with the step's first forward; else the one served last
        before it. Whether it is the right one shows in the replay, where the inputs are compared."""
        marks = set(_read(self.forwards[0][0].marks))
        scores = [len(marks.intersection(_read(each.marks))) for each in self.served]
        best = max(scores, default=0)
        if best:
            return max(place for place, score in enumerate(scores) if score == best)
        return max(0, min(len(self.served), len(self.served) - (self.total - self.first)) - 1)

    def _forwards(self, tensors: List[Named]) -> List[Dict[str, Any]]:
        rows = []
        for place, (forward, state) in enumerate(self.forwards):
            whole, states = rng.pack(state, "forward.%d.random" % place)
            tensors += states
            rows.append({"module": forward.module, "marks": marks_of(forward), "random": whole})
        return rows

    def _write(self, index: Dict[str, Any], tensors: List[Named], size: int) -> None:
        """Into a folder beside the final one, which gets its name when all is on the disk."""
        final = os.path.join(self.folder, "rank-%d" % rank())
        if os.path.exists(final):
            raise Unfit("there is one already (two processes of rank %d?)" % rank())
        os.makedirs(self.folder, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < size + SPARE:
            raise Unfit("there is no room: it takes %s, and %s are free" % (_bytes(size), _bytes(free)))
        unfinished = "%s.%d.tmp" % (final, os.getpid())
        try:
            os.mkdir(unfinished)
            written = tensorfile.write(os.path.join(unfinished, TENSORS), tensors)
            index["tensors"] = {"size": written.size, "sum": written.sum}
            _write_index(os.path.join(unfinished, INDEX), index)
            os.rename(unfinished, final)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _write_index(path: str, index: Dict[str, Any]) -> None:
    """Two lines: the sum of the second, and the index."""
    text = line(index)
    with open(path, "wb") as file:
        file.write(b"%d\n" % zlib.crc32(text) + text)
        file.flush()
        os.fsync(file.fileno())


def read_index(folder: str) -> Dict[str, Any]:
    """The index of a rank's capsule. Raises BadFile."""
    path = os.path.join(folder, INDEX)
    try:
        with open(path, "rb") as file:
            head, text = file.readline(), file.read()
        if int(head) != zlib.crc32(text):
            raise tensorfile.BadFile("%s is not what was written: its sum is another" % INDEX)
        index = json.loads(text)
        if index["schema"] != SCHEMA:
            raise tensorfile.BadFile("%s is of another version of nanbisect" % INDEX)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise tensorfile.BadFile("%s can't be read: %s" % (INDEX, error)) from error
    return dict(index)


def marks_of(forward: Forward) -> List[Any]:
    """What a forward was given, in short, as JSON has it. Reads the host."""
    return [[list(mark.key[0]), str(mark.key[1]), mark.total] for mark in _read(forward.marks)]


def _read(marks: List[inputs.Mark]) -> List[inputs.Mark]:
    sums = inputs.read_sums([mark.total for mark in marks])
    return [inputs.Mark(mark.key, total) for mark, total in zip(marks, sums)]


def _optimizer(optimizer: Any, name: str, tensors: List[Named]) -> Dict[str, Any]:
    """Groups and state. State is kept by the place of its parameter, in the dtype that it has."""
    rows: List[Dict[str, Any]] = []
    places = [(g, p, each) for g, group in enumerate(optimizer.param_groups) for p, each in enumerate(group["params"])]
    for group, place, parameter in places:
        for key, value in optimizer.state.get(parameter, {}).items():
            row: Dict[str, Any] = {"group": group, "place": place, "key": str(key)}
            if not isinstance(value, torch.Tensor):
                rows.append({**row, "value": _plain(value)})
            elif type(value) in (torch.Tensor, torch.nn.Parameter) and tensorfile.storable(value):
                row["tensor"] = "%s.%d.%d.%s" % (name, group, place, key)
                tensors.append((row["tensor"], value))
                rows.append({**row, "with_parameter": value.device == parameter.device})
            else:
                raise Unfit("the optimizer's state is sharded or of a kind that can't be kept")
    groups = [
        {"options": {key: _option(value) for key, value in group.items() if key != "params"},
         "shapes": [list(parameter.shape) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]  # fmt: skip
    return {"class": type(optimizer).__name__, "groups": groups, "state": rows}


def _option(value: Any) -> Any:
    """A group's option; a tensor (a learning rate that a graph reads) as a number beside its mark."""
    if isinstance(value, torch.Tensor):
        return {"tensor": float(value)} if value.numel() == 1 else None
    return {"value": _plain(value), "tuple": isinstance(value, tuple)}


def _plain(value: Any) -> Any:
    """JSON values as they are. Raises Unfit for anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise Unfit("the optimizer keeps a %s, which can't be kept here" % type(value).__name__)


def _bytes(size: int) -> str:
    return "%.1f GB" % (size / 1e9) if size >= 1e9 else "%.1f MB" % (size / 1e6)
