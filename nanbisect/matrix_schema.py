"""A JSON Schema of the matrix file, so that an editor completes and underlines while one writes.

It says what a schema can say of one trainer's matrices; what hangs together across the file (levels of
equal value, rules that exclude too much) is for `matrix_file` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanbisect.matrix import Matrix, Setting, Vocabulary
from nanbisect.matrix_check import SWITCH
from nanbisect.matrix_shape import DEVICES, MAY_BE_EMPTY

Json = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TEXT: Json = {"type": ["string", "number", "boolean"]}  # any plain value: its spelling is what counts
WORD: Json = {**TEXT, "pattern": r"\S"}
POSITIVE: Json = {"type": "integer", "minimum": 1}
WORDS: Json = {"type": "array", "items": TEXT}
TEMPLATE: Json = {"anyOf": [WORDS, {"type": "object"}]}
COMMAND: Json = {
    "command": {
        **WORDS,
        "minItems": 1,
        "description": "the training command; with a preset it replaces the preset's way to start the trainer",
    },
    "flags": {
        "type": "object",
        "additionalProperties": TEMPLATE,
        "description": "setting -> words for every level ({value}), or one list of words a level",
    },
}
DURATION = r"^[0-9.]+(h( ?[0-9.]+m)?( ?[0-9.]+s)?|m( ?[0-9.]+s)?|s)?$"


def json_schema(vocabulary: Vocabulary) -> Json:
    """The schema (draft 2020-12) of the matrix files of the trainer with this vocabulary."""
    keys = {**_plain_keys(), "recipe": _recipe(vocabulary.recipes), **_sections(vocabulary)}
    if vocabulary.commands:
        keys |= COMMAND
    return {
        "$schema": DRAFT,
        "title": "A nanbisect matrix",
        "type": "object",
        "required": ["trainer"],
        "properties": {key: _or_empty(schema) if key in MAY_BE_EMPTY else schema for key, schema in keys.items()},
        "additionalProperties": False,
    }


def _plain_keys() -> dict[str, Json]:
    """The keys that no vocabulary changes."""
    return {
        "name": {**WORD, "description": "also the start of the run folder's name; the file's name by default"},
        "trainer": {**WORD, "description": "what executes the training steps of a cell"},
        "model": {**WORD, "description": "a local folder or a hub id; or --model-path"},
        "data": {**WORD, "description": "the data file; or --train-jsonl"},
        "steps": {
            **POSITIVE,
            "description": "optimizer steps of the cells with the largest batch",
            "default": Matrix.steps,
        },
        "records": {"type": "array", "items": WORD, "minItems": 1, "description": "ids of the records to train on"},
        "skip_records": {
            "type": "integer",
            "minimum": 0,
            "description": "records to pass over first",
            "default": Matrix.skip_records,
        },
        "repeat": {**POSITIVE, "description": "attempts a cell, each with its own seed", "default": Matrix.repeat},
        "timeout": {
            "type": ["number", "string"],
            "exclusiveMinimum": 0,
            "pattern": DURATION,
            "description": "of one attempt: 90s, 10m, 1h30m, or seconds",
            "default": Matrix.timeout,
        },
        "device": {"enum": list(DEVICES), "description": "where cells train", "default": Matrix.device},
        "gpus_per_cell": {
            "anyOf": [POSITIVE, {"const": "all"}],
            "description": "GPUs of one cell: a number, or all",
            "default": Matrix.gpus_per_cell,
        },
        "trust_remote_code": {
            "type": "boolean",
            "description": "whether a hub model's own code may run",
            "default": Matrix.trust_remote_code,
        },
        "env": {
            "type": "object",
            "propertyNames": {"pattern": "^[^=]+$"},
            "additionalProperties": TEXT,
            "description": "environment variables of the training process",
        },
        "workdir": {**WORD, "description": "working folder of the training process", "default": Matrix.workdir},
    }


def _recipe(recipes: tuple[str, ...]) -> Json:
    """A built-in recipe or a Python file; anything for a trainer without recipes."""
    known: Json = {"anyOf": [{"enum": list(recipes)}, {"type": "string", "pattern": r"\.py$"}]}
    return {**(known if recipes else WORD), "description": "the user's model, data and losses for the trainer"}


def _sections(vocabulary: Vocabulary) -> dict[str, Json]:
    """`settings`, `factors` and `exclude`: the keys whose words are the trainer's settings.

    Where a matrix may have flags of its own, it may have settings of its own, too.
    """
    fixed, varied, named = {}, {}, {}
    for name, setting in vocabulary.settings.items():
        level = _level(setting)
        named[name] = {**level, "description": setting.summary}
        fixed[name] = {**named[name], **({"default": setting.default} if setting.default else {})}
        levels = {"type": "array", "items": level, "minItems": 2, "uniqueItems": True}
        varied[name] = {**levels, "description": setting.summary}
    one: Json | bool = TEXT if vocabulary.commands else False
    many: Json | bool = vocabulary.commands and {"type": "array", "items": TEXT, "minItems": 2, "uniqueItems": True}
    rule = {**_object(named, one), "minProperties": 1}
    suspicion = "settings under suspicion; the first level is the safe one"
    return {
        "settings": {**_object(fixed, one), "description": "settings that are the same in every cell"},
        "factors": {**_object(varied, many), "description": suspicion},
        "exclude": {"type": "array", "items": rule, "description": "cells to leave out: those that match any rule"},
    }


def _level(setting: Setting) -> Json:
    """One level. A switch may be written with true and false, which YAML reads as booleans."""
    if not setting.choices:
        return TEXT
    booleans = [word == "true" for word, level in SWITCH.items() if level in setting.choices]
    return {"enum": [*setting.choices, *booleans]}


def _object(properties: Mapping[str, Json], others: Json | bool) -> Json:
    """An object with these properties, and others of that schema (False: none)."""
    return {"type": "object", "properties": dict(properties), "additionalProperties": others}


def _or_empty(schema: Json) -> Json:
    """The schema of a key that may be left empty: `model:`."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": [*kinds, "null"]}
