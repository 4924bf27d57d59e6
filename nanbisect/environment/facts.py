"""Collects the facts: one process in the Python that trains, and a look at the machine beside it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanbisect import machine as driving
from nanbisect.environment.machine import machine
from nanbisect.errors import UsageError
from nanbisect.executors.base import Executor
from nanbisect.machine import Looked, Occasion
from nanbisect.store import DIARY
from nanbisect.trainers.base import Launch
from nanbisect.trainers.interpreter import find_program

LOOK = Path(__file__).with_name("look.py")
SECONDS = 120.0  # for the import of torch, and for each trial: a first start of CUDA on a cold disk takes a minute

Facts = Mapping[str, Any]


def interpreter(word: str, environ: Mapping[str, str]) -> str:
    """The interpreter that `--python` names: a path, or a name on the PATH. Raises UsageError."""
    path = Path(word).expanduser()
    if path.is_dir():
        inside = path / "bin" / "python"
        mend = f"--python {inside}" if inside.is_file() else "the python in the folder bin of a virtual environment"
        raise UsageError(f"--python {word}: that is a folder\ntry: {mend}")
    found = find_program(str(path), workdir=Path.cwd(), env=environ)
    if found is None:
        raise UsageError(
            f"--python {word}: there is no such program\ntry: the path of the python of the environment you train in"
        )
    return os.path.abspath(found)  # noqa: PTH100 - not resolved: a virtual environment's python is a link


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder for a while. Raises UsageError where none can be made, which is a finding, too."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="nanbisect-doctor-"))
    except OSError as error:
        what = f"no temporary folder can be made: {error.strerror or error}"
        raise UsageError(f"{what}\ntry: make room, or set TMPDIR to a folder that you may write") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def facts_of(
    python: str, executor: Executor, occasion: Occasion, *, env: Mapping[str, str], runs: Path, seconds: float = SECONDS
) -> Facts:
    """All facts. Raises UsageError when `python` does not start as one.

    `env` is what a matrix adds to the environment; `seconds` are for each trial.
    """
    with workspace() as folder:
        launch = Launch((python, str(LOOK), str(folder / DIARY), f"{seconds:g}"), str(Path.cwd()), env)
        looked = driving.look(launch, folder, executor, occasion)
    if not looked.of("python"):
        last = f": {looked.tail[-1]}" if looked.tail else ""
        raise UsageError(
            f"{python} does not start as a Python of version 3.9 or newer{last}\n"
            "try: --python with the python of the environment you train in"
        )
    return {**folded(looked, seconds), "machine": machine({**occasion.environ, **env}, runs)}


def folded(looked: Looked, seconds: float) -> dict[str, Any]:
    """The lines by kind. What a process that ended early did not come to is said of torch, which it was at."""
    lines = [{key: value for key, value in line.items() if key != "kind"} for line in looked.lines]
    kinds = [line["kind"] for line in looked.lines]
    one = {name: lines[kinds.index(name)] for name in ("python", "torch", "cpu", "gpus") if name in kinds}
    if "torch" not in one:
        one["torch"] = {"error": f"the import {_ended(looked, seconds)}"}
    several = {
        name: [line for kind, line in zip(kinds, lines, strict=True) if kind == what]
        for name, what in (("kernels", "kernel"), ("flash", "flash"), ("imports", "import"))
    }
    imports = {line.pop("package"): line for line in several.pop("imports")}
    return {"python": {}, "torch": {}, "cpu": {}, "gpus": {}, **one, **several, "imports": imports}


def _ended(looked: Looked, seconds: float) -> str:
    ended = looked.ended
    if ended.signal == signal.SIGALRM or ended.why == "timed_out":
        return f"did not end within {seconds:g} s"
    if ended.signal is not None:
        return f"crashed: {signal.Signals(ended.signal).name}"
    last = f": {looked.tail[-1]}" if looked.tail else ""
    return f"ended the process with code {ended.code}{last}"
