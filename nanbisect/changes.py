"""`rerun --with k=v`: a cell of a finished run with other settings, which stands outside its matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nanbisect.errors import UsageError
from nanbisect.matrix import Cell, Matrix, Setting
from nanbisect.matrix_check import spelled
from nanbisect.matrix_command import settings_of
from nanbisect.matrix_flags import FLAGS
from nanbisect.matrix_shape import KEYS
from nanbisect.trainers.registry import TRAINERS
from nanbisect.yaml_tree import did_you_mean


def with_changes(matrix: Matrix, cell: Cell, changes: tuple[str, ...]) -> tuple[Matrix, Cell | None]:
    """The matrix and the changed cell, or None without changes. Raises UsageError for what can't be changed."""
    if not changes:
        return matrix, None
    trainer = TRAINERS[matrix.trainer]
    known = settings_of(trainer.vocabulary, matrix.command, matrix.flags)
    new: dict[str, str] = {}
    for change in changes:
        name, level = _read(change, known, commands=trainer.vocabulary.commands)
        if name in new:
            raise UsageError(f"--with {change}: {name} is given twice\ntry: keep one of them")
        new[name] = level
    changed = Cell(cell.number, {**cell.levels, **new})
    for _, what, mend in trainer.vocabulary.check(narrowed(matrix, changed)):
        raise UsageError(f"--with {' '.join(changes)}: {what}\ntry: {mend}")
    return replace(matrix, steps=trainer.steps_for(matrix, changed.levels)), changed


def narrowed(matrix: Matrix, cell: Cell) -> Matrix:
    """The matrix of that cell alone: its levels as fixed settings."""
    return replace(matrix, factors=(), exclude=(), settings={**matrix.settings, **cell.levels})


def _read(change: str, known: Mapping[str, Setting], *, commands: bool) -> tuple[str, str]:
    """Name and level of `k=v`. Raises UsageError."""
    name, _, level = (part.strip() for part in change.partition("="))
    if name not in known:
        what, mend = _unknown(name, known, commands=commands)
        raise UsageError(f"--with {change}: {what}\ntry: {mend}")
    if not level:
        raise UsageError(f"--with {change}: no level\ntry: --with {name}=LEVEL")
    level = spelled(known[name], level)
    try:
        known[name].parse(level)
    except ValueError as error:
        meant = did_you_mean(level, known[name].choices)
        raise UsageError(
            f"--with {change}: {level!r} is not a level of {name}\ntry: {meant}--with {name}=LEVEL with {error}"
        ) from error
    return name, level


def _unknown(name: str, known: Mapping[str, Setting], *, commands: bool) -> tuple[str, str]:
    if name in KEYS:
        flag = FLAGS.get(name)
        mend = f"a new run, with {name} changed in the matrix" + (f", or with {flag}" if flag else "")
        return f"{name} is a key of the matrix, not a setting", mend
    own = "; a flag of the command becomes a setting by a line under flags in the matrix" if commands else ""
    return f"no setting {name}", f"{did_you_mean(name, known)}one of {', '.join(known)}{own}"
