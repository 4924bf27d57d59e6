"""The shape of a matrix file: its keys, the type of each, and what to say of a value that has another.

Validators say what and mend; pydantic finds them all, with their paths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from nanbisect.matrix import Matrix, Vocabulary
from nanbisect.yaml_tree import Findings, Scalar, Tree, TreePath, did_you_mean, is_null

DEVICES = ("auto", "cuda", "cpu")


def parse_duration(text: str) -> float:
    """Seconds in `90s`, `10m`, `2h`, `1h30m` or a plain number. Raises ValueError with the mend."""
    parts = re.fullmatch(r"(?:([0-9.]+)h)? ?(?:([0-9.]+)m)? ?(?:([0-9.]+)s)?", text.strip())
    try:
        if parts and any(parts.groups()):
            units = zip(parts.groups("0"), (3600, 60, 1), strict=True)
            seconds = sum(float(part) * unit for part, unit in units)
        else:
            seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError("a duration above zero, such as 90s, 10m, 1h30m, or a number of seconds")
    return seconds


def _refusal(what: str, mend: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{what}", {"what": what, "mend": mend})


def _one_value(value: Any) -> Scalar:
    if not isinstance(value, Scalar):
        raise PydanticCustomError("one_value", "one value")
    return value


def _given(value: Any) -> Scalar:
    scalar = _one_value(value)
    if scalar.kind == "null":
        raise _refusal("is empty", "write a value, or remove the line")
    return scalar


def _text(value: Any) -> str:
    return _given(value).text


def _word(value: Any) -> str:
    text = _text(value)
    if not text.strip():
        raise _refusal("is empty", "write a value, or remove the line")
    return text


def _whole(value: Any, *, least: int) -> int:
    scalar = _given(value)
    try:
        number = int(scalar.text, 0) if scalar.kind == "int" else least - 1
    except ValueError:
        number = least - 1
    if number < least:
        mend = f"write a whole number of at least {least}, without quotes"
        raise _refusal(f"{scalar.text!r} is not a whole number of at least {least}", mend)
    return number


def _gpus(value: Any) -> int | None:
    scalar = _given(value)
    if scalar.text == "all":
        return None
    try:
        return _whole(scalar, least=1)
    except PydanticCustomError:
        what = f"{scalar.text!r} is not a number of GPUs"
        raise _refusal(what, "write a whole number of at least 1, or all") from None


def _boolean(value: Any) -> bool:
    scalar = _given(value)
    if scalar.kind != "bool":
        raise _refusal(f"{scalar.text!r} is not true or false", "write true or false, without quotes")
    return scalar.text.lower() == "true"


def _seconds(value: Any) -> float:
    text = _given(value).text
    try:
        return parse_duration(text)
    except ValueError as error:
        raise _refusal(f"{text!r} is not a duration", f"write {error}") from None


def _device(value: Any) -> str:
    text = _given(value).text
    if text not in DEVICES:
        raise _refusal(f"{text!r} is not a device", f"use one of {', '.join(DEVICES)}")
    return text


Level = Annotated[Scalar, PlainValidator(_one_value)]
Text = Annotated[str, PlainValidator(_text)]
Word = Annotated[str, PlainValidator(_word)]
Positive = Annotated[int, PlainValidator(partial(_whole, least=1))]
Natural = Annotated[int, PlainValidator(partial(_whole, least=0))]


class Shape(BaseModel):
    """The keys of a matrix file, and the type of each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Word | None = None
    trainer: Word | None = None
    recipe: Word | None = None
    model: Word | None = None
    data: Word | None = None
    steps: Positive = Matrix.steps
    records: list[Word] | None = None
    skip_records: Natural = Matrix.skip_records
    repeat: Positive = Matrix.repeat
    timeout: Annotated[float, PlainValidator(_seconds)] = Matrix.timeout
    device: Annotated[str, PlainValidator(_device)] = Matrix.device
    gpus_per_cell: Annotated[int | None, PlainValidator(_gpus)] = Matrix.gpus_per_cell
    trust_remote_code: Annotated[bool, PlainValidator(_boolean)] = Matrix.trust_remote_code
    settings: dict[str, Level] = {}
    factors: dict[str, list[Level]] = {}
    exclude: list[dict[str, Level]] = []
    env: dict[str, Text] = {}
    workdir: Word = Matrix.workdir
    command: list[Text] | None = None
    flags: Any = None


KEYS = tuple(Shape.model_fields)
MAY_BE_EMPTY = ("name", "recipe", "model", "data", "settings", "factors", "exclude", "env")
ONE_VALUE = ("must be one value", "write one plain value, not a list or a mapping")
SHAPES = {  # by section and depth: what was expected there, and how to write it
    ("settings", 1): ("must be a mapping of settings to values", "write settings: {precision: bf16}"),
    ("settings", 2): (
        "a fixed setting has one value",
        'move it under factors, or quote a value that holds commas: "1,8"',
    ),
    ("factors", 1): ("must be a mapping of settings to levels", "write factors: {attention: [sdpa, eager]}"),
    ("factors", 2): ("a factor is a list of levels", "write [SAFE, OTHER], or move it under settings"),
    ("factors", 3): ("a level is one value", 'quote a level that holds commas: "1,8"'),
    ("exclude", 1): ("must be a list of rules", "write exclude: [{attention: flash, precision: fp32}]"),
    ("exclude", 2): (
        "a rule is a mapping of settings to levels",
        "write {attention: flash, precision: fp32}",
    ),
    ("exclude", 3): ("a rule names one level of each setting", "write one rule for each level"),
    ("command", 1): ("must be a list of words", "write command: [python, train.py, --lr, 1e-5]"),
    ("command", 2): ("a word of the command is one value", "write a flat list of words"),
    ("records", 1): ("must be a list of record ids", "write records: [utt17, utt93]"),
    ("env", 1): ("must be a mapping of names to text", 'write env: {NAME: "value"}'),
}


def shape_of(tree: dict[str, Tree], findings: Findings, vocabularies: Mapping[str, Vocabulary]) -> Shape:
    """The file with its types; what has a problem is left out, so that the rest can be checked, too."""
    tree = {key: value for key, value in tree.items() if not (key in MAY_BE_EMPTY and is_null(value))}
    try:
        return Shape.model_validate(tree)
    except ValidationError as error:
        bad = []
        for item in error.errors(include_url=False):
            path = item["loc"]
            if item["type"] == "extra_forbidden":
                findings.add_at_key(path, *_unknown_key(str(path[0]), vocabularies))
            else:
                refusal = item.get("ctx", {}) if item["type"] == "refused" else {}
                what, mend = SHAPES.get((str(path[0]), len(path)), ONE_VALUE)
                findings.add(path, refusal.get("what", what), refusal.get("mend", mend))
            bad.append(path)
        return Shape.model_validate(_without(tree, bad))


def _without(tree: dict[str, Tree], bad: Sequence[TreePath]) -> dict[str, Tree]:
    """Leaves out bad entries of mappings; whole lists, as their other items must keep their index."""
    kept: dict[str, Tree] = {}
    for key, value in tree.items():
        inside = [path for path in bad if path[0] == key]
        if not inside:
            kept[key] = value
        elif isinstance(value, dict) and all(len(path) > 1 for path in inside):
            names = {path[1] for path in inside}
            kept[key] = {name: item for name, item in value.items() if name not in names}
    return kept


def _unknown_key(key: str, vocabularies: Mapping[str, Vocabulary]) -> tuple[str, str]:
    if any(key in vocabulary.settings for vocabulary in vocabularies.values()):
        return f"{key} is a setting, not a key of the matrix", "move it under settings or factors"
    return f"unknown key {key!r}", f"{did_you_mean(key, KEYS)}known keys: {', '.join(KEYS)}"
