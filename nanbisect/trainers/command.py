"""Any training command, unmodified: the plain `command` trainer, and the presets. No torch here."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nanbisect.cells import Cells
from nanbisect.errors import UsageError
from nanbisect.evidence import Effect
from nanbisect.matrix import Cell, Matrix, Vocabulary
from nanbisect.matrix_command import placeholders
from nanbisect.outcome import Note, all_float32
from nanbisect.ports import free_port, port_environment
from nanbisect.store import DIARY
from nanbisect.trainers import templates
from nanbisect.trainers.base import Launch, probe_environment, together
from nanbisect.trainers.command_problems import problems
from nanbisect.trainers.interpreter import find_program, find_python
from nanbisect.trainers.presets import Preset
from nanbisect.trainers.sft import effect
from nanbisect.trainers.sft.launch import model_path
from nanbisect.trainers.warm_start import warm_start

INSTALLED = Path(__file__).with_name("installed.py")
CONFIG_FILE = "config.yaml"
OWN_CONFIG = "config_file"  # the setting that names a configuration of the user's, over which ours is laid
SCRIPT = re.compile(r"[^\s{}]+\.py")
BATCH = ("batch_size", "gradient_accumulation", "processes")  # settings whose product is the global batch
NO_TRACKERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "AXOLOTL_DO_NOT_TRACK": "1",
}
HALVES = ("bf16", "fp16")
KERNELS = {"eager": ("SoftmaxBackward0",), "sdpa": effect.ANY_SDPA, "flash": effect.FLASH}


class CommandTrainer:
    """Starts the user's own command for a cell, under the probe."""

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.vocabulary = Vocabulary(settings=preset.settings, check=self._problems, commands=True)

    def launch(self, matrix: Matrix, cell: Cell, *, seed: int, folder: Path) -> Launch:
        """One attempt of a cell. Writes the configuration file, where the command reads one."""
        folder, workdir = folder.resolve(), workdir_of(matrix)
        settings = {**self._defaults, **matrix.settings, **cell.levels}
        parts = templates.parts_of(matrix, self.preset, settings)
        steps = steps_of(matrix, settings)
        built_in = self._values(matrix, parts, steps=steps, seed=seed, folder=folder)
        values = {**settings, **built_in}
        env = self._environment(matrix)
        words, expansions = self._named(matrix, parts, env)
        argv = _filled(words, values)
        if any(part.config for part in expansions):
            base = _own_config(settings.get(OWN_CONFIG), Path(matrix.folder))
            write_config(folder / CONFIG_FILE, templates.config_of(expansions, values, base))
        probe = {
            **probe_environment(folder, {"PYTHONPATH": _absolute_path(matrix, workdir)}),
            "NANBISECT_STOP": "event",
            "NANBISECT_STEPS": str(steps),
        }
        model = values.get("model")
        port = port_environment(argv, int(built_in.get("port") or free_port()))
        return Launch(
            argv,
            str(workdir),
            {**port, **env, **probe},
            from_hub=model is not None and not Path(model).is_absolute(),
            warm=warm_start(argv, workdir=workdir, env={**os.environ, **env}),
        )

    def check(self, matrix: Matrix, *, folder: Path) -> Launch:
        """One look into the command's own Python. Raises UsageError when something that it needs is not there."""
        folder, workdir, env = folder.resolve(), workdir_of(matrix), self._environment(matrix)
        self._look(matrix, workdir, {**os.environ, **env})
        settings = {**self._defaults, **matrix.settings, **matrix.baseline}
        parts = templates.parts_of(matrix, self.preset, settings)
        values = {**settings, **self._values(matrix, parts, steps=matrix.steps, seed=0, folder=folder)}
        argv = _filled(parts.argv(self.preset.after), values)
        python = find_python(argv, workdir=workdir, env={**os.environ, **env})
        return self._looking(
            folder,
            workdir,
            env,
            python=python,
            device=matrix.device,
            flags=templates.flag_names(self._all_of_ours(matrix)) if python else [],
            parsers=[_parser(item, workdir, values) for item in self.preset.parsers],
            needs=self._needs(matrix) if python else {},  # packages of our own Python say nothing of the command's
        )

    def levels(self, matrix: Matrix, *, folder: Path, python: str | None = None) -> Launch | None:
        """One look for what levels need. Words that wait for a model or a script are passed over."""
        folder, workdir, env = folder.resolve(), workdir_of(matrix), self._environment(matrix)
        values = {**self._defaults, **matrix.settings, **matrix.baseline}
        words = [word for word in matrix.command or self.preset.command if set(placeholders(word)) <= set(values)]
        found = find_python(_filled(words, values), workdir=workdir, env={**os.environ, **env}) or python
        if found is None:
            return None
        return self._looking(folder, workdir, env, python=found, device=matrix.device, needs=self._needs(matrix))

    def effect(self, matrix: Matrix, cell: Cell, resolved: Mapping[str, Any]) -> Effect:
        """Checkpointing is judged by what ran again in backward, and a precision that is varied by what was cast.

        Attention, and a precision that all cells share, are doubts: the code is not ours.
        """
        settings = {**matrix.settings, **cell.levels}
        level = settings.get("gradient_checkpointing", "")
        judged = {"gradient_checkpointing": level} if level in ("on", "off", "true", "false", "reentrant") else {}
        failed = effect.effect_of(judged, frozenset(), resolved).failed
        doubts = [*_attention_doubts(cell.levels.get("attention"), resolved)]
        full = _full_precision(settings.get("precision"), resolved)
        if full is not None and "precision" in cell.levels:
            failed = failed or full
        elif full is not None:
            doubts.append(Note("precision_otherwise", full))
        return Effect(failed, tuple(doubts))

    def work(self, matrix: Matrix, cells: Sequence[Cell]) -> Mapping[str, float]:
        """Micro-batches of each cell, as far as its settings tell."""
        found = {}
        for cell in cells:
            settings = {**matrix.settings, **cell.levels}
            found[cell.id] = float(steps_of(matrix, settings) * _count(settings, "gradient_accumulation"))
        return found

    def steps_for(self, matrix: Matrix, levels: Mapping[str, str]) -> int:
        """The matrix's own: how many records there are is the command's affair."""
        return matrix.steps

    def keep(self, matrix: Matrix, cell: Cell) -> str:
        """A command's process is the command's own."""
        return ""

    def inputs(self, matrix: Matrix) -> Mapping[str, Path]:
        """The files among the command's words, the model and the data, where they are local."""
        folder = workdir_of(matrix)
        found = {word: Path(folder, word) for word in matrix.command if "{" not in word}
        found = {word: path for word, path in found.items() if path.is_file()}
        for name, text in (("model", matrix.model), ("data", matrix.data)):
            if text and Path(matrix.folder, text).exists():
                found[name] = Path(matrix.folder, text)
        return found

    def _look(self, matrix: Matrix, workdir: Path, env: Mapping[str, str]) -> None:
        """Whether what the matrix names is there. Raises UsageError with all that is not.

        After a program that is no Python's (a container, ssh) script and data may lie where nobody can look.
        """
        settings = {**self._defaults, **matrix.settings, **matrix.baseline}
        words = matrix.command or self.preset.command
        values = {**{name: f"{{{name}}}" for word in words for name in placeholders(word)}, **settings}
        argv = templates.fill_all(words, values)
        there = find_program(argv[0], workdir=workdir, env=env) is not None
        elsewhere = there and find_python(argv[:1], workdir=workdir, env=env) is None
        here: list[Callable[[], object]] = [
            lambda: _script(words, argv, workdir),
            lambda: _data(matrix),
        ]
        together(
            lambda: there or _no_program(argv[0], workdir),
            lambda: model_path(matrix),
            lambda: _own_config(settings.get(OWN_CONFIG), Path(matrix.folder)),
            *([] if elsewhere else here),
        )

    # pieces ------------------------------------------------------------------------------------

    @property
    def _defaults(self) -> dict[str, str]:
        """Settings that are nothing but placeholders of the preset."""
        flags = self.preset.flags
        return {n: s.default for n, s in self.preset.settings.items() if s.default and n not in flags and n != "seed"}

    def _values(self, matrix: Matrix, parts: templates.Parts, *, steps: int, seed: int, folder: Path) -> dict[str, str]:
        """What the built-in placeholders stand for; those that this matrix lacks are absent."""
        used = {name for word in parts.base for name in placeholders(word)}
        used |= {name for part in parts.expansions for name in placeholders([part.words, part.config])}
        values = {
            "steps": str(steps),
            "steps_plus_one": str(steps + 1),
            "seed": str(seed),
            "cell_dir": str(folder),
            "config": str(folder / CONFIG_FILE),
            "gpus": str(matrix.gpus_per_cell),
        }
        model, data = model_path(matrix), data_of(matrix)
        values |= {} if model is None else {"model": model}
        values |= {} if data is None else {"data": data}
        return values | ({"port": str(free_port())} if "port" in used else {})

    def _looking(self, folder: Path, workdir: Path, env: Mapping[str, str], *, python: Any, **job: Any) -> Launch:
        """`installed.py` in the command's Python; in our own, if nobody can tell which that is."""
        whole = {"diary": str(folder / DIARY), "known": python is not None, "flags": [], "parsers": [], **job}
        path = folder / "check.json"
        path.write_text(json.dumps(whole), encoding="utf-8")
        return Launch((str(python or sys.executable), str(INSTALLED), str(path)), str(workdir), env)

    def _environment(self, matrix: Matrix) -> dict[str, str]:
        return {**NO_TRACKERS, **matrix.env}

    def _named(
        self, matrix: Matrix, parts: templates.Parts, env: Mapping[str, str]
    ) -> tuple[tuple[str, ...], list[Any]]:
        """The words and keys with the names that the installed trainer knows."""
        workdir = workdir_of(matrix)

        def known() -> frozenset[str]:
            python = find_python(parts.base, workdir=workdir, env={**os.environ, **env})
            parsers = tuple(item for item in self.preset.parsers if not item.startswith("{"))
            return installed_names(str(python), parsers, str(workdir)) if python else frozenset()

        words = templates.resolved_names(parts.argv(self.preset.after), known)
        return words, [templates.resolved_keys(part, known) for part in parts.expansions]

    def _all_of_ours(self, matrix: Matrix) -> list[Any]:
        """Every template of the preset that some cell uses."""
        parts = templates.parts_of(matrix, self.preset, {})
        used = _levels(matrix)
        flags = {name: levels for name, levels in self.preset.flags.items() if name not in matrix.flags}
        levels = [{name: level} for name, texts in used.items() for level in texts]
        return [*parts.ours, parts.forced, *(part for one in levels for part in templates.expand_flags(flags, one))]

    def _needs(self, matrix: Matrix) -> dict[str, dict[str, str]]:
        """What levels of this matrix need, by the preset."""
        used = _levels(matrix)
        return {
            name: {level: package for level, package in needs.items() if level in used[name]}
            for name, needs in self.preset.needs.items()
            if name in used and name not in matrix.flags
        }

    def _problems(self, matrix: Matrix) -> Sequence[tuple[str, str, str]]:
        return tuple(problems(matrix, self.preset))


# helpers ---------------------------------------------------------------------------------------


def steps_of(matrix: Matrix, settings: Mapping[str, str]) -> int:
    """Optimizer steps of a cell: smaller global batches take proportionally more, over the same records."""
    largest = max(_global_batch({**matrix.settings, **split}) for split in Cells(matrix).combinations(BATCH))
    return -(-matrix.steps * largest // _global_batch(settings))


def _global_batch(settings: Mapping[str, str]) -> int:
    return math.prod(_count(settings, name) for name in BATCH)


def _count(settings: Mapping[str, str], name: str) -> int:
    """A setting's whole number; 1 for one that is not given or means something else here."""
    text = settings.get(name, "")
    return max(1, int(text)) if text.isdecimal() else 1


def _parser(item: str, workdir: Path, values: Mapping[str, str]) -> str:
    """A pattern below a package, or the whole path of the script that parses. Raises UsageError without it."""
    if not item.startswith("{"):
        return item
    path = workdir / _filled([item], values)[0]
    if not path.is_file():
        raise UsageError(
            f"the script is not there: no file {path}\ntry: --set {item[1:-1]}=PATH, or workdir: in the matrix"
        )
    return str(path)


def _levels(matrix: Matrix) -> dict[str, tuple[str, ...]]:
    """Every level that some cell has, by setting."""
    fixed: dict[str, tuple[str, ...]] = {name: (level,) for name, level in matrix.settings.items()}
    return fixed | {factor.name: factor.levels for factor in matrix.factors}


def workdir_of(matrix: Matrix) -> Path:
    """Where the command runs. Raises UsageError if it is not there."""
    path = Path(matrix.folder, Path(matrix.workdir).expanduser()).resolve()
    if not path.is_dir():
        raise UsageError(f"the working folder {matrix.workdir!r} is not there: {path}\ntry: workdir: in the matrix")
    return path


def data_of(matrix: Matrix) -> str | None:
    """A local file or folder made absolute, anything else (a hub name, a pattern) as it is."""
    if matrix.data is None:
        return None
    path = Path(matrix.folder, Path(matrix.data).expanduser())
    return str(path.resolve()) if path.exists() else matrix.data


def _data(matrix: Matrix) -> None:
    """Raises UsageError for data by a path that is not there."""
    data = data_of(matrix)
    if data and data.startswith((".", "/", "~")) and not re.search(r"[*?[]", data) and not Path(data).exists():
        raise UsageError(
            f"the data {data!r} is not there: no file or folder {Path(matrix.folder, Path(data).expanduser())}\n"
            "try: data: in the matrix (relative to it), or --train-jsonl FILE"
        )


def _no_program(word: str, workdir: Path) -> NoReturn:
    where = f"no program {workdir / word}" if "/" in word else "it is not on PATH"
    raise UsageError(
        f"the command can't be started: {word}: {where}\n"
        "try: activate the environment that you train in, or write the whole path into the command"
    )


def _script(words: Sequence[str], argv: Sequence[str], workdir: Path) -> None:
    """Raises UsageError unless the script is there: the first word that is one."""
    for template, word in zip(words, argv, strict=True):
        if SCRIPT.fullmatch(word):
            if (workdir / word).is_file():
                return
            name = next(placeholders(template), None)
            mend = f"--set {name}=PATH" if name else "its path in the command"
            raise UsageError(
                f"the script is not there: no file {workdir / word}\ntry: {mend}, or workdir: in the matrix"
            )


def _filled(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return templates.fill_all(words, values)
    except KeyError as error:
        name = str(error.args[0])
        flag = {"model": "--model-path DIR-OR-HUB-ID", "data": "--train-jsonl FILE"}.get(name, f"--set {name}=VALUE")
        raise UsageError(f"the command needs {{{name}}}, and the matrix has none\ntry: {flag}") from error


def _absolute_path(matrix: Matrix, workdir: Path) -> str:
    """PYTHONPATH with whole paths: the matrix's are relative to the working folder, ours to where we stand."""
    own = matrix.env.get("PYTHONPATH")
    base = Path.cwd() if own is None else workdir
    text = os.environ.get("PYTHONPATH", "") if own is None else own
    return ":".join(str(base / entry) for entry in text.split(":") if entry)


def _own_config(path: str | None, folder: Path) -> dict[str, Any]:
    """The user's configuration, read as the trainers read it. Raises UsageError for one that can't be used."""
    if not path:
        return {}
    file = Path(folder, Path(path).expanduser())
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the configuration {file} can't be read: {why}\ntry: --set {OWN_CONFIG}=FILE") from error
    if not isinstance(data, dict):
        raise UsageError(f"the configuration {file} is no mapping of keys\ntry: --set {OWN_CONFIG}=FILE")
    return data


def write_config(path: Path, data: Mapping[str, Any]) -> None:
    """As YAML that PyYAML and OmegaConf read back unchanged: 1e-05 is written 1.0e-05."""
    path.write_text(yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True), encoding="utf-8")


@lru_cache(maxsize=32)
def installed_names(python: str, parsers: tuple[str, ...], workdir: str) -> frozenset[str]:
    """The flags that the trainer's sources define in that interpreter; empty when nobody can tell."""
    script = [python, str(INSTALLED), "--names", "/dev/stdin"]
    job = json.dumps({"parsers": parsers})
    done = subprocess.run(script, input=job, capture_output=True, text=True, cwd=workdir, check=False, timeout=120)
    try:
        return frozenset(json.loads(done.stdout)) if done.returncode == 0 else frozenset()
    except ValueError:  # something of that name that is no Python
        return frozenset()


def _full_precision(level: str | None, resolved: Mapping[str, Any]) -> str | None:
    """What shows that a training asked for in half precision computed in float32; None where nothing does."""
    if level not in HALVES or not all_float32(resolved):
        return None
    return f"precision={level} was asked for, and all parameters are float32 and nothing was cast"


def _attention_doubts(level: str | None, resolved: Mapping[str, Any]) -> Iterator[Note]:
    family = next((name for name in KERNELS if level is not None and level.startswith(name)), None)
    seen = resolved.get("kernels", {})
    wanted = KERNELS.get(family or "", ())
    if family is None or not seen:
        return
    if not any(node == want or (want != "SoftmaxBackward0" and want in node) for node in seen for want in wanted):
        shows = ", ".join(sorted(seen))
        yield Note("attention_otherwise", f"the command was given attention={level}, and the graph shows {shows}")
