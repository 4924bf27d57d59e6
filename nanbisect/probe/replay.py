"""A capsule played back: the same unmodified command computes the failing step as its first.

Batches are handed out where the script's own loader gives one (its own is thrown away); random state is set
there and at every forward; parameters, buffers and the scale of a GradScaler are copied in before the first
training forward, the optimizer's state before its step. Whether it is the same step is not believed but looked
at: the inputs of every forward are compared with those of the original.

What can't be used is refused: the process ends at its first training forward, and says why.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List

import torch

from . import rng, tensorfile
from .batches import Forward
from .capsule import TENSORS, kind_of, marks_of, read_index
from .journal import rank
from .packing import Unpackable, unpack
from .tensorfile import BadFile

NONFINITE = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}


class Refused(Exception):
    """Why the capsule can't be played back; the message says it."""


class Player:
    """Gives a process the state of a capsule. `told` takes the fields of a `replay` event, once."""

    def __init__(self, folder: str, told: Callable[..., Any]) -> None:
        self.folder = folder
        self.told = told
        self.index: Dict[str, Any] = {}
        self.tensors: Dict[str, torch.Tensor] = {}
        self.loaded = False
        self.scalers: List[Any] = []
        self.restored: List[int] = []  # ids of modules that have their values
        self.optimizers = 0
        self.handed = 0
        self.forwards = 0
        self.differs: int | None = None
        self.refused: str | None = None
        self.over = False
        self.seconds = 0.0

    def _load(self) -> None:
        """Read the files of this process's rank, once. Raises BadFile."""
        if self.loaded:
            return
        self.loaded, began = True, time.perf_counter()
        folder = os.path.join(self.folder, "rank-%d" % rank())
        if not os.path.isdir(folder):
            raise BadFile("there is no capsule of rank %d" % rank())
        self.index = read_index(folder)
        if self.index["torch"] != str(torch.__version__):
            raise BadFile("it was written by torch %s, and this is %s" % (self.index["torch"], torch.__version__))
        expected = self.index["tensors"]
        written = tensorfile.Written(expected["size"], expected["sum"])
        self.tensors = tensorfile.read(os.path.join(folder, TENSORS), written)
        self.seconds += time.perf_counter() - began

    def _tries(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work`; what it can't do is kept as the reason to refuse. None then."""
        if self.over or self.refused is not None:
            return None
        try:
            self._load()
            return work(*args)
        except (BadFile, Unpackable, Refused) as error:
            self.refused = str(error)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            self.refused = "it does not fit this training: %r" % error
        return None

    # batches -----------------------------------------------------------------------------------

    def serve(self, iterator: Any, batch: Any) -> Any:
        """What the script is to get instead of `batch`: the saved one, as long as there are any."""
        found = self._tries(self._serve, iterator, batch)
        return batch if found is None else found

    def _serve(self, iterator: Any, batch: Any) -> Any:
        rows = self.index["served"]
        if self.handed >= len(rows) or rows[self.handed]["kind"] != kind_of(iterator):
            return None
        row = rows[self.handed]
        found = unpack(row["batch"], self.tensors, row["name"], batch)
        rng.put(rng.unpack(row["random"], self.tensors))
        self.handed += 1
        return found

    # state -------------------------------------------------------------------------------------

    def prepare(self, module: torch.nn.Module, roots: List[Any]) -> None:
        """Before a training forward of `module`: copy in what belongs to it and to the roots known so far."""
        self._tries(self._prepare, [*(root for root in roots if root is not None and root is not module), module])

    def _prepare(self, modules: List[torch.nn.Module]) -> None:
        began = time.perf_counter()
        for module in modules:
            if id(module) not in self.restored:
                self._restore(module)
                self.restored.append(id(module))
        if not self.forwards:
            for scaler, state in zip(self.scalers, self.index["scalers"]):
                if scaler() is not None:
                    scaler().load_state_dict(dict(state))
        self.seconds += time.perf_counter() - began

    def _restore(self, module: torch.nn.Module) -> None:
        """The values of the first saved root that has this one's class and names."""
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        for row in self.index["roots"]:
            names = [[name for name, _ in row[what]] for what in ("parameters", "buffers")]
            if row["class"] == type(module).__name__ and names == [list(parameters), list(buffers)]:
                break
        else:
            raise Refused("the training calls another model (%s) than when it was written" % type(module).__name__)
        for name, key in [*row["parameters"], *row["buffers"]]:
            tensor = parameters[name] if name in parameters else buffers[name]
            saved = self.tensors[key]
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                raise Refused("%s has another shape or dtype than when it was written" % name)
            with torch.no_grad():
                tensor.copy_(saved)

    def forward(self, forward: Forward) -> None:
        """A training forward starts: set the random state, and look whether it has the same inputs."""
        self._tries(self._forward, forward)

    def _forward(self, forward: Forward) -> None:
        rows = self.index["forwards"]
        if self.forwards < len(rows):
            row = rows[self.forwards]
            rng.put(rng.unpack(row["random"], self.tensors))
            if self.differs is None and (row["module"], row["marks"]) != (forward.module, marks_of(forward)):
                self.differs = self.forwards
        self.forwards += 1

    def stepping(self, optimizer: Any) -> None:
        """An optimizer is about to step for the first time: give it its state."""
        self._tries(self._optimizer, optimizer)

    def _optimizer(self, optimizer: Any) -> None:
        place, self.optimizers = self.optimizers, self.optimizers + 1
        if place >= len(self.index["optimizers"]):
            return  # it had not stepped before the failing step: it has no state
        row = self.index["optimizers"][place]
        shapes = [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
        if row["class"] != type(optimizer).__name__ or shapes != [group["shapes"] for group in row["groups"]]:
            raise Refused("the training has another optimizer than when it was written")
        for group, saved in zip(optimizer.param_groups, row["groups"]):
            _options(group, saved["options"])
        for item in row["state"]:
            parameter = optimizer.param_groups[item["group"]]["params"][item["place"]]
            optimizer.state.setdefault(parameter, {})[item["key"]] = self._state(item, parameter)

    def _state(self, item: Dict[str, Any], parameter: torch.Tensor) -> Any:
        """Set as it was: `load_state_dict` would cast it to the parameter's dtype."""
        if "tensor" not in item:
            return item["value"]
        saved = self.tensors[item["tensor"]].clone()
        return saved.to(parameter.device) if item["with_parameter"] else saved

    # the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """The step is over (or the process): say what was done."""
        if self.over or not (self.loaded or self.refused):
            return
        self.over = True
        self.told(
            "replay", step=self.index.get("step"), micro_batch=self.index.get("micro_batch"), rank=rank(),
            refused=self.refused, handed=self.handed, of=len(self.index.get("served", ())), forwards=self.forwards,
            differs=self.differs, seconds=self.seconds,
        )  # fmt: skip
        self.tensors = {}


def _options(group: Dict[str, Any], saved: Dict[str, Any]) -> None:
    """Learning rate, betas and so on as they were."""
    for key, option in saved.items():
        if key not in group or option is None:
            continue
        if "tensor" in option:
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(option["tensor"])
            continue
        value = option["value"]
        value = tuple(value) if option["tuple"] else value
        group[key] = NONFINITE.get(value, value) if isinstance(value, str) else value
