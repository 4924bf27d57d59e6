"""Looks at the Python of a training command: `PYTHON installed.py JOB.json`, or `--names JOB.json`.

Runs in the user's interpreter, which may have nothing but the standard library, and imports nothing of
theirs: versions come from package metadata, flags from the text of the trainer's sources. Only the GPUs
need torch, in a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

OLDEST_TORCH, OLDEST_PYTHON = (2, 1), (3, 9)
PACKAGES = (
    *("transformers", "accelerate", "flash-attn", "numpy", "trl", "peft", "deepspeed"),
    *("llamafactory", "ms-swift", "axolotl", "liger-kernel"),
)
VERSION = re.compile(r"^__version__\b[^=\n]*=\s*['\"]([^'\"]+)", re.MULTILINE)
GPUS = """
import json, torch
there = torch.cuda.is_available()
gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if there else 0)]
print(json.dumps({"cuda": torch.version.cuda, "gpus": [{"name": g.name, "memory": g.total_memory} for g in gpus]}))
"""


class Unusable(Exception):
    """Why no cell of this command could be judged here, with the mend."""


def main(arguments: list[str]) -> int:
    """Write the lines that the driver reads; or, with --names, print the flags that the sources define."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    job = json.loads(Path(arguments[-1]).read_text(encoding="utf-8"))
    if arguments[0] == "--names":
        sys.stdout.write(json.dumps(sorted(names_in(list(sources(job["parsers"])))[0])))
        return 0
    began = time.perf_counter()

    def write(kind: str, **fields: Any) -> None:
        with Path(job["diary"]).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps({"kind": kind, "at": time.perf_counter() - began, **fields}) + "\n")

    try:
        facts = environment(job)
        write("environment", **facts)
        check_flags(job)
        for setting, level, reason in unsupported(job["needs"], facts["device"]):
            write("level", setting=setting, level=level, reason=reason)
        write("end", how="done")
    except Unusable as error:
        write("end", how="bad_input", text=str(error))
    return 0


# versions and devices --------------------------------------------------------------------------


def environment(job: dict[str, Any]) -> dict[str, Any]:
    """Versions and devices, as a report shows them. Raises Unusable without a torch that the probe works with."""
    torch = torch_version() if job["known"] else None
    if job["known"]:
        check_torch(torch)
    found = gpus(job["device"]) if job["device"] != "cpu" else {"cuda": None, "gpus": []}
    if job["device"] == "cuda" and not found["gpus"]:
        raise Unusable(
            f"device: cuda, and torch in {sys.executable} sees no GPU\ntry: --device cpu, or look at nvidia-smi"
        )
    return {
        "device": "cuda" if found["gpus"] else "cpu",
        "python": platform.python_version() if job["known"] else None,
        "torch": torch,
        **found,
        "packages": {name: text for name in PACKAGES if job["known"] and (text := version(name))},
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": " ".join((platform.system(), *platform.libc_ver())).strip(),
    }


def check_torch(torch: str | None) -> None:
    """Raises Unusable for a Python or torch that is missing or too old."""
    if sys.version_info < OLDEST_PYTHON:
        raise Unusable(
            f"the command runs {sys.executable}, Python {platform.python_version()}; the probe needs 3.9\n"
            "try: the interpreter of a newer environment as the command's first word"
        )
    if torch is None:
        raise Unusable(
            f"the command runs {sys.executable}, which has no torch\n"
            "try: activate the environment that you train in, or write its python into the command"
        )
    numbers = re.findall(r"\d+", torch)[:2]
    if len(numbers) == 2 and tuple(map(int, numbers)) < OLDEST_TORCH:
        raise Unusable(
            f"the command runs {sys.executable}, which has torch {torch}; the probe needs 2.1\ntry: a newer torch"
        )


def version(name: str) -> str | None:
    """A package's version; `unknown` for one that is there without metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        module = name.replace("-", "_")
        return "unknown" if importlib.util.find_spec(module) is not None else None


def torch_version() -> str | None:
    """Of the torch that an import would get: its own word, since the metadata may be another's."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for name in ("version.py", "__init__.py"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found = VERSION.search(Path(folder, name).read_text(encoding="utf-8"))
                if found:
                    return found[1]
    return version("torch") if spec else None


def gpus(device: str) -> dict[str, Any]:
    """What torch sees; torch is asked only where a GPU seems to be."""
    there = shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
    if not there and device != "cuda":
        return {"cuda": None, "gpus": []}
    done = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return dict(json.loads(lines[-1])) if done.returncode == 0 and lines else {"cuda": None, "gpus": []}


def unsupported(needs: dict[str, dict[str, str]], device: str) -> Iterator[tuple[str, str, str]]:
    """Levels that lack a package (a|b: either will do) or the GPU that such a package needs."""
    for setting, levels in needs.items():
        for level, text in levels.items():
            packages = text.split("|")
            if not any(importlib.util.find_spec(name) for name in packages):
                yield setting, level, f"{setting}={level} needs the package {' or '.join(packages)}"
            elif device == "cpu":
                yield setting, level, f"{setting}={level} needs a GPU"


# flags -----------------------------------------------------------------------------------------


def check_flags(job: dict[str, Any]) -> None:
    """Raises Unusable for a flag of the preset that the installed trainer does not have."""
    files = list(sources(job["parsers"]))
    names, readable = names_in(files)
    if not readable:
        return
    missing = [wanted for wanted in job["flags"] if not any(name in names for name in wanted)]
    if missing:
        shown = ", ".join("|".join(names) for names in missing)
        raise Unusable(
            f"the installed trainer has no {shown} (looked in {', '.join(map(str, readable))})\n"
            "try: leave out that setting, map it under flags by the name that your version uses, or install "
            "another version of the trainer"
        )


def sources(parsers: list[str]) -> Iterator[Path]:
    """The files that define a trainer's flags: absolute ones, or below an installed package."""
    for pattern in parsers:
        if Path(pattern).is_absolute():
            yield Path(pattern)
            continue
        package, _, rest = pattern.partition("/")
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted(Path(folder).glob(rest))


def names_in(files: list[Path]) -> tuple[set[str], list[Path]]:
    """Fields of classes and `--words` of all files, and which files could be read."""
    names: set[str] = set()
    readable = []
    for path in files:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        readable.append(path)
        for node in ast.walk(tree):
            names.update(_names(node))
    return names, readable


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                yield item.target.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
        yield node.value[2:].replace("-", "_")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
