"""Which program a command starts, and which Python runs it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PYTHON = re.compile(r"(python|pypy)[0-9.]*")


def find_program(word: str, *, workdir: Path, env: Mapping[str, str]) -> Path | None:
    """The file that the word starts: on PATH, or (with a slash) relative to the working folder."""
    if "/" in word:
        path = workdir / Path(word).expanduser()
        return path if path.is_file() and os.access(path, os.X_OK) else None
    found = shutil.which(word, path=env.get("PATH"))
    return workdir / found if found else None


def find_python(argv: Sequence[str], *, workdir: Path, env: Mapping[str, str]) -> Path | None:
    """The interpreter of the first word that is one, or a script of one: wrappers such as `nice` are passed over."""
    programs = (find_program(word, workdir=workdir, env=env) for word in argv if not word.startswith("-"))
    return next((python for program in programs if program and (python := _python_of(program, env))), None)


def _python_of(program: Path, env: Mapping[str, str]) -> Path | None:
    """The program itself, or the interpreter that its first lines name."""
    if PYTHON.fullmatch(program.name):
        return program
    for word in _first_lines(program):
        if PYTHON.fullmatch(Path(word).name):
            found = word if "/" in word else shutil.which(word, path=env.get("PATH"))
            return Path(found) if found else None
    return None


def _first_lines(program: Path) -> Iterator[str]:
    """Words of `#!...`; installers write long ones as `#!/bin/sh` and `'''exec' /path/python` below."""
    try:
        with program.open("rb") as handle:
            lines = handle.read(4096).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return
    if lines and lines[0].startswith("#!"):
        yield from lines[0][2:].split()
        if len(lines) > 1 and lines[1].startswith("'''exec'"):
            yield from re.findall(r"\"([^\"]+)\"|(\S+)", lines[1])[1]
