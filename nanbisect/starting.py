"""`init`: writes a first matrix, or says which there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from nanbisect.errors import UsageError
from nanbisect.store import atomic_write, explained
from nanbisect.trainers.starter_text import starter_text
from nanbisect.trainers.starters import Starter, starters
from nanbisect.yaml_tree import did_you_mean

STDOUT = Path("-")


def listing() -> str:
    """Every name that `init` takes, with one line each."""
    there = starters()
    width = max(map(len, there))
    lines = [f"  {name:<{width}}  {starter.about[0]}" for name, starter in there.items()]
    return "\n".join(["nanbisect init PRESET writes a matrix, ready to edit, for:", *lines])


def begin(name: str, *, out: Path | None, force: bool) -> str:
    """Write the matrix of that name; returns what to tell. To standard output (`-`) it is the matrix itself.

    Raises UsageError for an unknown name and a file that is there, StoreError for one that can't be written.
    """
    starter = _starter(name)
    if out == STDOUT:
        return starter_text(starter, name=name, file=f"{name}.yaml").rstrip("\n")
    file = out or Path(f"{name}.yaml")
    if file.is_dir():
        raise UsageError(f"{file} is a folder\ntry: --out {file / name}.yaml")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent} for {file.name}\ntry: make it first, or another --out FILE")
    if file.exists() and not force:
        raise UsageError(f"{file} is there already\ntry: --force to write over it, or another --out FILE")
    with explained(file):
        atomic_write(file, starter_text(starter, name=_name(file, name), file=str(file)))
    return _told(starter, file)


def _starter(name: str) -> Starter:
    there = starters()
    if name not in there:
        mend = f"{did_you_mean(name, there)}one of {', '.join(there)}"
        raise UsageError(f"there is no preset {name!r}\ntry: {mend}")
    return there[name]


def _name(file: Path, name: str) -> str:
    """The matrix is called like its file, where that is a plain name: run folders begin with it."""
    return file.stem if re.fullmatch(r"\w[\w.-]*", file.stem) else name


def _told(starter: Starter, file: Path) -> str:
    factors = ", ".join(factor.name for factor in starter.factors)
    return "\n".join(
        [
            f"wrote {file}: {starter.cells} cells over {factors}",
            f"next: fill in what it marks with <-- ({', '.join(starter.asks)}), then",
            f"  nanbisect plan {shlex.quote(str(file))}",
            f"  nanbisect run {shlex.quote(str(file))}",
        ]
    )
