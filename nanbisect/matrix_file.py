"""YAML text -> Matrix: every problem at once, each with line, column, path and the mend.

`yaml_tree` reads the text, `matrix_flags` lays the command line over it, `matrix_shape` looks at the
shape, `matrix_command` reads the command's templates, and `matrix_check` looks at what depends on the
trainer, against its vocabulary. Levels and settings keep
the spelling of the file. No file, clock or environment is touched: paths stay as written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from nanbisect.errors import MatrixError
from nanbisect.matrix import Expansion, Factor, Flags, Matrix, Vocabulary
from nanbisect.matrix_check import Check, excluded_too_much, vocabulary_of
from nanbisect.matrix_command import with_command
from nanbisect.matrix_flags import NO_OVERRIDES, Overrides, overlay
from nanbisect.matrix_shape import parse_duration, shape_of
from nanbisect.outcome import jsonable
from nanbisect.yaml_tree import Findings, UnreadableError, parse_tree

__all__ = ["NO_OVERRIDES", "Overrides", "matrix_from_json", "matrix_to_json", "parse_duration", "read_matrix"]


def read_matrix(
    text: str,
    *,
    source: str,
    folder: str,
    vocabularies: Mapping[str, Vocabulary],
    overrides: Overrides = NO_OVERRIDES,
) -> Matrix:
    """The matrix in `text`, with the flags laid over it. Raises MatrixError with all that is wrong.

    `source` names the file in messages (and its stem names the matrix); `folder` is what relative paths
    in the file are relative to.
    """
    findings = Findings()
    try:
        tree = overlay(parse_tree(text, findings), overrides, findings)
    except UnreadableError as error:
        raise MatrixError(source, [error.problem]) from None
    shape = shape_of(tree, findings, vocabularies)
    vocabulary = vocabulary_of(shape, findings, vocabularies)
    flags: Flags = {}
    if vocabulary and vocabulary.commands:
        flags, vocabulary = with_command(shape, findings, vocabulary)
    matrix = Check(shape, findings, vocabulary, flags).matrix(PurePath(source).stem or "matrix", folder)
    if vocabulary and not findings.touch(("factors",), ("settings",), ("exclude",), ("command",), ("flags",)):
        for path, what, mend in (*excluded_too_much(matrix), *vocabulary.check(matrix)):
            findings.add(findings.path(path), what, mend)
    if findings.problems:
        raise MatrixError(source, findings.problems)
    return matrix


def matrix_to_json(matrix: Matrix) -> dict[str, Any]:
    """Plain JSON values, for `run.json`. A matrix without a command says nothing of one."""
    data = dict(jsonable(asdict(matrix)))
    return {key: value for key, value in data.items() if value or key not in ("command", "flags")}


def matrix_from_json(data: Mapping[str, Any]) -> Matrix:
    """The inverse of `matrix_to_json`. Raises ValueError for anything else."""
    try:
        factors = tuple(Factor(item["name"], tuple(item["levels"])) for item in data["factors"])
        lists = {name: tuple(data.get(name, ())) for name in ("exclude", "records", "command")}
        return Matrix(**{**data, **lists, "factors": factors, "flags": _flags(data.get("flags", {}))})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a matrix: {error}") from error


def _flags(data: Mapping[str, Any]) -> Flags:
    return {
        name: {level: Expansion(tuple(item["words"]), item["config"]) for level, item in levels.items()}
        for name, levels in data.items()
    }
