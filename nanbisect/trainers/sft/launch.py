"""The built-in trainer as the driver sees it. No torch here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanbisect.errors import UsageError
from nanbisect.evidence import Effect
from nanbisect.executors.base import WarmStart
from nanbisect.matrix import Cell, Matrix
from nanbisect.trainers.base import Launch, probe_environment, together
from nanbisect.trainers.sft import effect, held
from nanbisect.trainers.sft.job import Job, global_batch, largest_batch, size, value_of
from nanbisect.trainers.sft.settings import ON_A_LOADED_MODEL, RECIPES, SETTINGS, VOCABULARY

SAME_ORDER = {"PYTHONHASHSEED": "0"}  # a recipe that goes through a set must give every cell the same records
PRELOADED = ("nanbisect.trainers.sft.loop",)
RECIPE = "nanbisect.trainers.sft.recipes.causal_lm"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class SftTrainer:
    """Starts `python -m nanbisect.trainers.sft` for a cell or for the check of an environment."""

    vocabulary = VOCABULARY

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """One attempt of a cell, under the probe."""
        settings = {**matrix.settings, **cell.levels}
        job = self._job(matrix, settings=settings, seed=seed, folder=folder)
        job.write(folder / "job.json")
        env = self._environment(matrix, folder)
        if settings.get("deterministic", "off") != "off":
            env.update(DETERMINISTIC)
        from_hub = job.model is not None and not Path(job.model).is_absolute()
        argv = self._argv(folder)
        return Launch(argv, str(self._workdir(matrix)), env, from_hub, self._warm(job, argv))

    @staticmethod
    def _warm(job: Job, argv: tuple[str, ...]) -> WarmStart:
        """The built-in recipe's model is read once, where it lies in a folder; a user's recipe reads its own."""
        if job.recipe not in RECIPES:
            return WarmStart(argv[0], "module", argv[2:], modules=PRELOADED, scripts=(job.recipe,), ours=True)
        local = job.model is not None and Path(job.model).is_absolute() and not job.trust_remote_code
        given = held.argument(str(job.model), str(value_of(job.settings, "param_dtype"))) if local else ""
        prepare = (held.__name__, given) if local else None
        return WarmStart(argv[0], "module", argv[2:], modules=(*PRELOADED, RECIPE), prepare=prepare, ours=True)

    def check(self, matrix: Matrix, *, folder: Path) -> Launch:
        """One look at this machine, the recipe, the model's configuration and the data.

        Raises UsageError with all of them that are not there.
        """
        together(lambda: recipe_path(matrix), lambda: model_path(matrix), lambda: data_path(matrix))
        return self._checking(matrix, "--check", folder)

    def levels(self, matrix: Matrix, *, folder: Path, python: str | None = None) -> Launch:
        """One look at this machine. It trains in our own Python, and in no other."""
        return self._checking(replace(matrix, model=None, data=None), "--levels", folder)

    def _checking(self, matrix: Matrix, what: str, folder: Path) -> Launch:
        levels: dict[str, tuple[str, ...]] = {
            name: (matrix.settings.get(name, setting.default),) for name, setting in SETTINGS.items()
        }
        levels |= {factor.name: factor.levels for factor in matrix.factors}
        settings = {**matrix.settings, **matrix.baseline}
        job = self._job(matrix, settings=settings, seed=int(matrix.settings.get("seed", "0")), folder=folder)
        Job(**{**job.__dict__, "levels": levels}).write(folder / "job.json")
        argv = (*self._argv(folder), what)
        warm = replace(self._warm(job, argv), prepare=None)  # nothing is loaded before it was looked at
        return Launch(argv, str(self._workdir(matrix)), self._environment(matrix, folder), warm=warm)

    @staticmethod
    def _environment(matrix: Matrix, folder: Path) -> dict[str, str]:
        """The check has that of the cells, with the probe, so that it can start from the same server."""
        return {**SAME_ORDER, **matrix.env, **probe_environment(folder, {**os.environ, **matrix.env})}

    def effect(self, matrix: Matrix, cell: Cell, resolved: Mapping[str, Any]) -> Effect:
        """See `effect`."""
        settings = {**matrix.settings, **cell.levels}
        return effect.effect_of(settings, frozenset(cell.levels), resolved)

    def work(self, matrix: Matrix, cells: Sequence[Cell]) -> Mapping[str, float]:
        """Micro-batches of each cell."""
        records = size(matrix)
        return {
            cell.id: float(-(-records // value_of({**matrix.settings, **cell.levels}, "batch_size"))) for cell in cells
        }

    def steps_for(self, matrix: Matrix, levels: Mapping[str, str]) -> int:
        """So many that the matrix has records enough for one batch of these levels at least."""
        batch = global_batch({**matrix.settings, **levels})
        return max(matrix.steps, -(-batch // largest_batch(matrix)))

    def keep(self, matrix: Matrix, cell: Cell) -> str:
        """Every setting that takes loading; all others can be changed on a loaded model, or by the loop."""
        settings = {**matrix.settings, **cell.levels}
        taken = {name: str(value_of(settings, name)) for name in SETTINGS if name not in ON_A_LOADED_MODEL}
        return json.dumps({"recipe": recipe_path(matrix), **taken}, sort_keys=True)

    def inputs(self, matrix: Matrix) -> Mapping[str, Path]:
        """The recipe's file, the data file and the model's folder, where they are local."""
        found = {"recipe": recipe_path(matrix), "data": data_path(matrix), "model": model_path(matrix)}
        return {name: Path(path) for name, path in found.items() if path and Path(path).is_absolute()}

    @staticmethod
    def _argv(folder: Path) -> tuple[str, ...]:
        return (sys.executable, "-m", "nanbisect.trainers.sft", str(folder / "job.json"))

    @staticmethod
    def _workdir(matrix: Matrix) -> Path:
        return Path(matrix.folder, matrix.workdir).resolve()

    @staticmethod
    def _job(matrix: Matrix, *, settings: dict[str, str], seed: int, folder: Path) -> Job:
        return Job(
            recipe=recipe_path(matrix),
            settings=settings,
            folder=str(folder.resolve()),
            size=size(matrix),
            seed=seed,
            model=model_path(matrix),
            data=data_path(matrix),
            device=matrix.device,
            records=matrix.records,
            skip_records=matrix.skip_records,
            trust_remote_code=matrix.trust_remote_code,
        )


def recipe_path(matrix: Matrix) -> str:
    """A built-in recipe's name, or the absolute path of the recipe's file."""
    recipe = matrix.recipe or ""
    if recipe in RECIPES:
        return recipe
    path = Path(matrix.folder, recipe).resolve()
    if not path.is_file():
        raise UsageError(
            f"the recipe {recipe!r} is not there: {path} is no file\n"
            f"try: a path relative to the matrix, or a built-in recipe ({', '.join(RECIPES)})"
        )
    return str(path)


def model_path(matrix: Matrix) -> str | None:
    """A local folder made absolute, or a hub id as it is. Raises UsageError for a path that is not there."""
    model = matrix.model
    if model is None:
        return None
    path = Path(matrix.folder, Path(model).expanduser())
    if path.exists():
        return str(path.resolve())
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(
            f"the model {model!r} is not there: no folder {path}\n"
            "try: --model-path DIR, or a hub id such as Qwen/Qwen3-0.6B"
        )
    return model


def data_path(matrix: Matrix) -> str | None:
    """The data file made absolute. Raises UsageError if it is not there."""
    if matrix.data is None:
        return None
    path = Path(matrix.folder, Path(matrix.data).expanduser())
    if not path.is_file():
        raise UsageError(
            f"the data file {matrix.data!r} is not there: {path}\n"
            "try: data: in the matrix (relative to it), or --train-jsonl FILE"
        )
    return str(path.resolve())
