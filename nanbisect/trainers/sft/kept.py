"""A training process that stays: cell after cell with the model it has loaded (`--keep-model`).

Each cell gets the weights, buffers and random numbers that loading gives, checked bit for bit before it
starts, and a probe that has seen nothing. A cell that ends otherwise than well ends the process. What
this can't undo (what a recipe keeps in its own globals, what a library remembers) is why the driver
repeats in processes of their own the cells that a cause stands on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from nanbisect.trainers.sft import loop, probe, setup
from nanbisect.trainers.sft.bases import Base, Bases, checksum, random_state, set_random_state
from nanbisect.trainers.sft.diary import Diary
from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.recipes.load import Recipe, load
from nanbisect.trainers.sft.settings import RECIPES
from nanbisect.trainers.sft.view import Settings, read_by


class PutAside(BaseException):
    """This process no longer has what was loaded. Not an Exception: no cell's outcome comes of it."""


class Kept(loop.Fresh):
    """Recipe and model of earlier cells, where loading would give the same. `stays`: the last cell ended well."""

    def __init__(self) -> None:
        self.bases = Bases()
        self.base: Base | None = None
        self.recipes: list[tuple[tuple[Any, ...], tuple[Any, ...], Recipe]] = []  # random numbers before and after it
        self.stays = False

    def train(self, job: Job, diary: Diary) -> str:
        """Train one cell as `loop.train` does. Raises PutAside."""
        self.stays, self.base = False, None
        how = loop.train(job, diary, self)
        if self.base is not None and self.base.touched():
            raise PutAside("the training reached the weights that are kept for other cells")
        self.stays = True
        return how

    def recipe(self, job: Job) -> Recipe:
        """Imported once; a user's again where random numbers stand elsewhere: its import may draw or seed."""
        if job.recipe in RECIPES:
            return load(job.recipe)
        now = random_state()
        for before, after, recipe in self.recipes:
            if now == before:
                set_random_state(after)
                return recipe
        recipe = load(job.recipe)
        self.recipes.append((now, random_state(), recipe))
        return recipe

    def model(self, recipe: Recipe, settings: Settings, plan: SimpleNamespace, device: torch.device) -> torch.nn.Module:
        """A copy of what was loaded, with the settings that a loaded model can take. Raises PutAside."""
        now, adapts = random_state(), tuple(getattr(recipe, "ADAPTS", ()))
        base = self.bases.find(settings, now, adapts)
        model = self._adapted(base, recipe, settings, device) if base is not None else None
        if base is None or model is None:
            own = settings.unread()
            base = Base(setup.loaded(recipe, own, plan), own, now)
            if not self.bases.keep(base):
                return self._fitted(base.model, base, settings, plan, device)
            model = base.copy(device)
        elif now == base.before:
            set_random_state(base.after)
        self.base = base
        model = self._fitted(model, base, settings, plan, device)
        mark = checksum(model)
        if base.mark is None and device.type == "cpu" and checksum(base.model)[1] != mark[1] and not _cast(base, model):
            raise PutAside("a copy of the loaded model has other bits")
        if base.mark not in (None, mark):
            raise PutAside("weights or buffers are no longer what was loaded")
        base.mark = mark
        return model

    @staticmethod
    def _adapted(base: Base, recipe: Recipe, settings: Settings, device: torch.device) -> torch.nn.Module | None:
        """A copy with the cell's attention; None if that takes loading."""
        model, adapt = base.copy(device), getattr(recipe, "adapt", None)
        return model if adapt is None or adapt(model, settings) else None

    @staticmethod
    def _fitted(
        model: torch.nn.Module, base: Base, settings: Settings, plan: SimpleNamespace, device: torch.device
    ) -> torch.nn.Module:
        read = read_by(base.settings)
        for name in read:  # what loading read, the cell has read
            settings[name]
        return setup.fitted(model, read, plan, device)


def _cast(base: Base, model: torch.nn.Module) -> bool:
    """Whether fitting changed dtypes, so that bits can't be compared."""
    return [t.dtype for t in base.model.parameters()] != [t.dtype for t in model.parameters()]


# one cell after another -------------------------------------------------------------------------


def serve(orders: Any, work: Callable[[list[str], Kept], int]) -> int:
    """Run cells until one ends badly or no more come; the exit code of the last."""
    kept, arguments, world = Kept(), sys.argv[1:], World()
    while True:
        try:
            code = work(arguments, kept)
        except PutAside as error:
            sys.stderr.write(f"nanbisect: {error}; this cell is made again in a process of its own\n")
            _tell(functools.partial(orders.put_aside, str(error)))
            return 1
        if code or not kept.stays:
            return code
        probe.finish()
        world.restore()
        _tell(functools.partial(orders.ended, 0))
        following = orders.next()
        if following is None:
            return 0
        arguments = following
        world.begin(arguments)


def _tell(say: Callable[[], None]) -> None:
    """Whatever was printed comes before."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(OSError):  # nobody there any more
        say()


class World:
    """What of the process a cell may have changed, as it was before the first one."""

    def __init__(self) -> None:
        self.path, self.folder, self.program = list(sys.path), Path.cwd(), sys.argv[0]
        self.dtype, self.threads = torch.get_default_dtype(), torch.get_num_threads()
        self.switches = {name: get() for name, (get, _) in SWITCHES.items()}

    def restore(self) -> None:
        """Put it back, and free what the cell has left."""
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.set_default_dtype(self.dtype)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.set_grad_enabled(True)
        for name, (get, put) in SWITCHES.items():
            if get() != self.switches[name]:
                put(self.switches[name])
        os.chdir(self.folder)
        sys.path[:] = self.path
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps what was freed in pieces
            ctypes.CDLL(None).malloc_trim(0)
        if CUDA.is_initialized():
            torch.cuda.empty_cache()

    def begin(self, arguments: list[str]) -> None:
        """The next cell is about to start: its arguments, its probe, its own peak of memory."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        sys.argv[:] = [self.program, *arguments]
        random.seed()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        if CUDA.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        probe.again()


def _put(place: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(place, name), lambda value: setattr(place, name, value)


CUDA: Any = torch.cuda
BACKEND: Any = torch.backends.cuda
CUDNN: Any = torch.backends.cudnn
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tf32": _put(BACKEND.matmul, "allow_tf32"),
    "cudnn_tf32": _put(CUDNN, "allow_tf32"),
    "benchmark": _put(CUDNN, "benchmark"),
    "math": (BACKEND.math_sdp_enabled, BACKEND.enable_math_sdp),
    "flash": (BACKEND.flash_sdp_enabled, BACKEND.enable_flash_sdp),
    "efficient": (BACKEND.mem_efficient_sdp_enabled, BACKEND.enable_mem_efficient_sdp),
}
