"""The schema for editors: what `matrix_file` reads, it takes; what a schema can see, it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanbisect.matrix import Setting, Vocabulary
from nanbisect.matrix_file import read_matrix
from nanbisect.matrix_schema import json_schema
from nanbisect.matrix_shape import KEYS
from nanbisect.trainers.registry import VOCABULARIES
from nanbisect.trainers.sft.settings import VOCABULARY
from nanbisect.yaml_tree import Findings, Scalar, Tree, parse_tree
from tests.commands import ROOT

SCHEMA = json_schema(VOCABULARY)
MATRICES = sorted((ROOT / "matrices").glob("*.yaml"))
HEAD = "trainer: sft\nrecipe: my_tts.py\n"
BODY = "factors: {attention: [sdpa, eager]}\n"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
SAYS_NOTHING = {"$schema", "title", "description", "default"}


def loaded(text: str) -> Any:
    """The values of a YAML text, as an editor that reads YAML 1.2 sees them."""
    return value_of(parse_tree(text, Findings()))


def value_of(tree: Tree) -> Any:
    if isinstance(tree, dict):
        return {key: value_of(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [value_of(item) for item in tree]
    return scalar_of(tree)


def scalar_of(scalar: Scalar) -> Any:
    read: dict[str, Any] = {
        "null": lambda text: None,
        "bool": lambda text: text.lower() == "true",
        "int": lambda text: int(text, 0),
        "float": float,
        "str": str,
    }
    return read[scalar.kind](scalar.text)


def same(value: Any, other: Any) -> bool:
    """Equality of JSON: true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def is_type(value: Any, kinds: str | list[str]) -> bool:
    known = [kinds] if isinstance(kinds, str) else kinds
    return any(isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in known)


ASSERTIONS: dict[str, Any] = {  # those of the draft that the schema uses; each for the types it speaks of
    "type": is_type,
    "enum": lambda value, those: any(same(value, other) for other in those),
    "const": same,
    "anyOf": lambda value, those: any(not list(complaints(value, other)) for other in those),
    "pattern": lambda value, rule: not isinstance(value, str) or re.search(rule, value),
    "minimum": lambda value, least: not is_type(value, "number") or value >= least,
    "exclusiveMinimum": lambda value, least: not is_type(value, "number") or value > least,
    "required": lambda value, names: not isinstance(value, dict) or set(names) <= set(value),
    "propertyNames": lambda value, rule: (
        not isinstance(value, dict) or not any(list(complaints(n, rule)) for n in value)
    ),
    "minProperties": lambda value, least: not isinstance(value, dict) or len(value) >= least,
    "minItems": lambda value, least: not isinstance(value, list) or len(value) >= least,
    "uniqueItems": lambda value, _: (
        not isinstance(value, list) or not any(same(a, b) for i, a in enumerate(value) for b in value[:i])
    ),
}


def complaints(value: Any, schema: Any, path: str = "") -> Iterator[str]:
    """`path: keyword` for all that the schema refuses. An unknown keyword is an error of the schema."""
    if schema is False:
        yield f"{path}: unknown"
        return
    for keyword, rule in schema.items():
        if keyword in ("properties", "additionalProperties", "items", *SAYS_NOTHING):
            continue
        if not ASSERTIONS[keyword](value, rule):
            yield f"{path}: {keyword}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name, item in value.items():
            yield from complaints(item, known.get(name, schema.get("additionalProperties", {})), f"{path}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from complaints(item, schema.get("items", {}), f"{path}[{index}]")


def refused(text: str) -> list[str]:
    return [item.removeprefix(".") for item in complaints(loaded(text), SCHEMA)]


def test_it_is_json_and_has_the_keys_of_the_matrix() -> None:
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(SCHEMA["properties"]) == set(KEYS) - {"command", "flags"}


def test_every_key_and_setting_is_described() -> None:
    assert all(schema["description"] for schema in SCHEMA["properties"].values())
    sections = [SCHEMA["properties"][key] for key in ("settings", "factors")]
    for section in (*sections, SCHEMA["properties"]["exclude"]["items"]):
        summaries = {name: schema["description"] for name, schema in section["properties"].items()}
        assert summaries == {name: setting.summary for name, setting in VOCABULARY.settings.items()}


def test_choices_are_enums_and_the_rest_is_any_plain_value() -> None:
    vocabulary = Vocabulary(
        {
            "mode": Setting("mode", "how", str, "a", ("a", "b")),
            "flag": Setting("flag", "whether", str, "off", ("off", "on")),
            "size": Setting("size", "how many", int, "1"),
        }
    )
    found = json_schema(vocabulary)["properties"]["settings"]["properties"]
    assert found == {
        "mode": {"enum": ["a", "b"], "description": "how", "default": "a"},
        "flag": {"enum": ["off", "on", True, False], "description": "whether", "default": "off"},
        "size": {"type": ["string", "number", "boolean"], "description": "how many", "default": "1"},
    }


def test_defaults_are_what_the_schema_takes() -> None:
    """Those of the keys and of the settings, as an editor would insert them."""
    keys = SCHEMA["properties"]
    for schema in (*keys.values(), *keys["settings"]["properties"].values()):
        if "default" in schema:
            assert not list(complaints(schema["default"], schema)), schema


@pytest.mark.parametrize("path", MATRICES, ids=lambda path: path.name)
def test_the_shipped_matrices_pass(path: Path) -> None:
    data = loaded(path.read_text(encoding="utf-8"))
    assert list(complaints(data, json_schema(VOCABULARIES[data["trainer"]]))) == []


def test_a_command_has_settings_of_its_own() -> None:
    schema = json_schema(VOCABULARIES["command"])
    assert {"command", "flags"} <= set(schema["properties"])
    text = "trainer: command\ncommand: [a, 1]\nflags: {lr: [--lr]}\nsettings: {lr: 1}\nfactors: {mode: [a, b]}\n"
    assert list(complaints(loaded(text), schema)) == []
    assert list(complaints(loaded(text + "exclude: [{mode: [a]}]"), schema)) == [".exclude[0].mode: type"]
    assert list(complaints(loaded("trainer: command\ncommand: a\nfactors: {mode: [a]}"), schema))


@pytest.mark.parametrize(
    "line",
    [
        "name:\nmodel: ~\ndata:\nsettings:\nexclude:\nenv:",
        "name: 2024",
        "settings: {learning_rate: 2e-5, gradient_checkpointing: true, deterministic: false, max_length: none}",
        'settings: {channel_weights: "1,8"}',
        "  batch_size: [1, '2', 8]",
        "  gradient_checkpointing: [false, true, reentrant]",
        "exclude: [{attention: eager, precision: fp32}]\nsettings: {precision: bf16}",
        "records: [17, utt93]\nskip_records: 0",
        "timeout: 90",
        "timeout: 1h30m",
        "timeout: 1h 30m 5s",
        "timeout: 1.5m",
        "steps: 0x10\nrepeat: 2",
        "device: cpu\ngpus_per_cell: 1\ntrust_remote_code: true\nworkdir: sub",
        "env: {A: 1, B: off, C: '', ON: x}",
    ],
)
def test_what_is_read_passes(line: str) -> None:
    text = f"{HEAD}factors:\n  attention: [sdpa, eager]\n{line}\n"
    read_matrix(text, source="my.yaml", folder=".", vocabularies={"sft": VOCABULARY})
    assert refused(text) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("stpes: 3", "stpes: unknown"),
        ("batch_size: 8", "batch_size: unknown"),
        ("command: [x]", "command: unknown"),
        ("settings: {sed: 1}", "settings.sed: unknown"),
        ("settings: {precision: bf61}", "settings.precision: enum"),
        ("settings: {deterministic: true}", "settings.deterministic: enum"),
        ("settings: {batch_size: [1, 8]}", "settings.batch_size: type"),
        ("settings: {seed: }", "settings.seed: type"),
        ("  batchsize: [1, 2]", "factors.batchsize: unknown"),
        ("  batch_size: [8]", "factors.batch_size: minItems"),
        ("  batch_size: [1, 2, 1]", "factors.batch_size: uniqueItems"),
        ("  batch_size: 8", "factors.batch_size: type"),
        ("  padding_side: [left, rigth]", "factors.padding_side[1]: enum"),
        ("exclude: [{atention: eager}]", "exclude[0].atention: unknown"),
        ("exclude: [{attention: flush}]", "exclude[0].attention: enum"),
        ("exclude: [{}]", "exclude[0]: minProperties"),
        ("exclude: {attention: eager}", "exclude: type"),
        ("steps: 0", "steps: minimum"),
        ("steps: '3'", "steps: type"),
        ("skip_records: -1", "skip_records: minimum"),
        ("records: []", "records: minItems"),
        ("timeout: 10 minutes", "timeout: pattern"),
        ("timeout: 0", "timeout: exclusiveMinimum"),
        ("device: gpu", "device: enum"),
        ("gpus_per_cell: 0", "gpus_per_cell: anyOf"),
        ("trust_remote_code: on", "trust_remote_code: type"),
        ('model: ""', "model: pattern"),
        ("env: {A=1: x}", "env: propertyNames"),
        ("env: {A: }", "env.A: type"),
    ],
)
def test_what_a_schema_can_see_is_refused(line: str, complaint: str) -> None:
    assert refused(f"{HEAD}factors:\n  attention: [sdpa, eager]\n{line}\n") == [complaint]


def test_a_trainer_and_a_known_recipe_are_asked_for() -> None:
    assert refused(BODY) == [": required"]
    assert refused(f"trainer: sft\nrecipe: causal-lm\n{BODY}") == []
    assert refused(f"trainer: sft\nrecipe: causal_ml\n{BODY}") == ["recipe: anyOf"]
    free = json_schema(Vocabulary({}))["properties"]["recipe"]
    assert not list(complaints("anything", free))
