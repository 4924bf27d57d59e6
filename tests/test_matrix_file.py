"""The matrix file: what is read, what is refused, and where each problem is said to be."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nanbisect.errors import MatrixError, Problem
from nanbisect.matrix import Factor, Matrix, Setting, Vocabulary, excluded, expand
from nanbisect.matrix_file import (
    NO_OVERRIDES,
    Overrides,
    matrix_from_json,
    matrix_to_json,
    parse_duration,
    read_matrix,
)
from nanbisect.matrix_flags import FLAGS
from nanbisect.matrix_shape import KEYS
from nanbisect.trainers.sft.settings import VOCABULARY

SEVERAL_GPUS = replace(VOCABULARY, check=lambda matrix: ())  # as a trainer that takes them
HEAD = "trainer: sft\nrecipe: my_tts.py\n"
BODY = "factors: {attention: [sdpa, eager], batch_size: [1, 2]}\n"
DESIGN = """\
name: my-tts-attention             # also the start of the run folder's name
trainer: sft                       # sft | command | a preset
recipe: my_tts.py
model: HuggingFaceTB/SmolLM2-135M  # or --model-path
data: train.jsonl                  # or --train-jsonl
steps: 3
records: [utt17, utt93]
repeat: 1
timeout: 10m
device: auto
gpus_per_cell: 1
trust_remote_code: false
settings: {precision: bf16, learning_rate: 2e-5, gradient_accumulation: 4}
factors:                           # the first level is the safe one
  gradient_checkpointing: [off, on]
  batch_size: [1, 2, 8]
  channel_weights: ["1,8", "1,32"]
  attention: [sdpa, eager, flash]
exclude: [{attention: flash, precision: fp32}]
env: {TOKENIZERS_PARALLELISM: "false"}
workdir: .
"""


def read(text: str, overrides: Overrides = NO_OVERRIDES, vocabulary: Vocabulary = VOCABULARY) -> Matrix:
    return read_matrix(
        text,
        source="some/where/my.yaml",
        folder="some/where",
        vocabularies={"sft": vocabulary},
        overrides=overrides,
    )


def problems(text: str, overrides: Overrides = NO_OVERRIDES) -> tuple[Problem, ...]:
    with pytest.raises(MatrixError) as caught:
        read(text, overrides)
    return caught.value.problems


def only(text: str, overrides: Overrides = NO_OVERRIDES) -> Problem:
    found = problems(text, overrides)
    assert len(found) == 1, "\n".join(map(str, found))
    return found[0]


# Good files.


def test_the_example_of_the_design_is_read_as_written() -> None:
    matrix = read(DESIGN)
    assert matrix == Matrix(
        name="my-tts-attention",
        trainer="sft",
        recipe="my_tts.py",
        model="HuggingFaceTB/SmolLM2-135M",
        data="train.jsonl",
        steps=3,
        records=("utt17", "utt93"),
        repeat=1,
        timeout=600.0,
        settings={"precision": "bf16", "learning_rate": "2e-5", "gradient_accumulation": "4"},
        factors=(
            Factor("gradient_checkpointing", ("off", "on")),
            Factor("batch_size", ("1", "2", "8")),
            Factor("channel_weights", ("1,8", "1,32")),
            Factor("attention", ("sdpa", "eager", "flash")),
        ),
        exclude=({"attention": "flash", "precision": "fp32"},),
        env={"TOKENIZERS_PARALLELISM": "false"},
        folder="some/where",
    )
    assert len(expand(matrix)) == 36


def test_what_is_not_said_has_the_defaults_of_the_matrix() -> None:
    matrix = read(HEAD + BODY)
    factors = (Factor("attention", ("sdpa", "eager")), Factor("batch_size", ("1", "2")))
    assert matrix == Matrix("my", "sft", factors, recipe="my_tts.py", folder="some/where")


def test_sections_and_words_may_be_left_empty() -> None:
    text = HEAD + "name:\nmodel:   # --model-path\ndata: ~\nsettings:\nexclude:\nenv:\n" + BODY
    matrix = read(text)
    assert (matrix.name, matrix.model, matrix.data) == ("my", None, None)
    assert (matrix.settings, matrix.exclude, matrix.env) == ({}, (), {})


@pytest.mark.parametrize(
    ("line", "name", "levels"),
    [
        ("learning_rate: [2e-5, 1.0E-4, .5]", "learning_rate", ("2e-5", "1.0E-4", ".5")),
        ("gradient_checkpointing: [off, on]", "gradient_checkpointing", ("off", "on")),
        ("gradient_checkpointing: [false, true]", "gradient_checkpointing", ("off", "on")),
        ("gradient_checkpointing: ['False', TRUE]", "gradient_checkpointing", ("off", "on")),
        ("deterministic: [false, kernels+fill]", "deterministic", ("off", "kernels+fill")),
        ("attention: [sdpa, sdpa:math]", "attention", ("sdpa", "sdpa:math")),
        ("max_length: [512, none]", "max_length", ("512", "none")),
        ('channel_weights: [none, "1,8"]', "channel_weights", ("none", "1,8")),
        ("batch_size:\n  - 1\n  - '2'", "batch_size", ("1", "2")),
        ("channel_weights:\n  - 1,8\n  - 1,32", "channel_weights", ("1,8", "1,32")),
        ("precision: &levels [bf16, fp16]\n  param_dtype: *levels", "param_dtype", ("bf16", "fp16")),
    ],
)
def test_levels_keep_their_spelling(line: str, name: str, levels: tuple[str, ...]) -> None:
    text = f"{HEAD}factors:\n  {line}\n"
    factor = read(text).factor(name)
    assert factor is not None
    assert factor.levels == levels


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("timeout: 90", "timeout", 90.0),
        ("timeout: 1h30m", "timeout", 5400.0),
        ("gpus_per_cell: all", "gpus_per_cell", None),
        ("gpus_per_cell: 4", "gpus_per_cell", 4),
        ("trust_remote_code: true", "trust_remote_code", True),
        ("records: [17, 1e3, 'no', \"0012\"]", "records", ("17", "1e3", "no", "0012")),
        ("skip_records: 9000", "skip_records", 9000),
        ("records: [a]\nskip_records: 2", "skip_records", 2),
        ("device: cpu", "device", "cpu"),
        ("model: 2024", "model", "2024"),
        ("env: {A: 1, B: off, C: '', ON: x}", "env", {"A": "1", "B": "off", "C": "", "ON": "x"}),
        ("settings: {gradient_checkpointing: true}", "settings", {"gradient_checkpointing": "on"}),
        ("steps: 0x10", "steps", 16),
        ("exclude: [{batch_size: +2}]", "exclude", ({"batch_size": "2"},)),
    ],
)
def test_values_are_read_as_yaml_1_2(line: str, key: str, value: Any) -> None:
    assert getattr(read(f"{HEAD}{line}\n{BODY}", vocabulary=SEVERAL_GPUS), key) == value


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm() -> None:
    assert read("\ufeff" + (HEAD + BODY).replace("\n", "\r\n")) == read(HEAD + BODY)


def test_a_rule_names_levels_by_value_and_may_guard_a_fixed_setting() -> None:
    idle = "{precision: fp32}, {deterministic: false, attention: eager}"
    rules = f"exclude: [{{learning_rate: 0.00002, attention: sdpa}}, {idle}]"
    fixed = "settings: {precision: bf16, deterministic: kernels}"
    matrix = read(f"{HEAD}{fixed}\nfactors: {{learning_rate: [1e-5, 2e-5], attention: [sdpa, eager]}}\n{rules}\n")
    assert matrix.exclude[0] == {"learning_rate": "2e-5", "attention": "sdpa"}
    assert matrix.exclude[2] == {"deterministic": "off", "attention": "eager"}
    assert len(expand(matrix)) == 3


# Text that holds no matrix at all: one problem, with its place.


@pytest.mark.parametrize(
    ("text", "line", "column", "what", "mend"),
    [
        ("", None, None, "empty", "trainer: sft"),
        ("# only a comment\n", None, None, "empty", "trainer: sft"),
        ("- a\n- b\n", 1, 1, "not a mapping", "trainer: sft"),
        ("just words\n", 1, 1, "not a mapping", "trainer: sft"),
        ("name: a: b\n", 1, 8, "mapping values are not allowed", "quote"),
        ("factors:\n\tattention: [sdpa, eager]\n", 2, 1, "cannot start any token", "spaces, not tabs"),
        ("factors:\n  attention: [sdpa, eager\nsteps: 3\n", 3, 6, "expected ',' or ']'", "close the bracket"),
        ("name: 'x\n", 2, 1, "end of stream", "close the quote"),
        ("name: *x\n", 1, 7, "undefined alias", "quote text that starts with *"),
        ("name: @x\n", 1, 7, "cannot start any token", "quote the text"),
        ("name: x\nsteps 3\n", 3, 1, "could not find expected ':'", "colon and a space"),
        ("name: x\n---\nname: y\n", 2, 1, "another document", "remove the --- line"),
        ("trainer: sft\nname: a\0b\n", 2, 8, "'\\x00' is not allowed", "UTF-8"),
        ('name: "\\UFFFFFFFF"\n', None, None, "not YAML", "escapes"),
        ("name: " + "[" * 5000, None, None, "nested too deeply", "three levels"),
        ("name: " + "[" * 60 + "]" * 60, 1, 27, "nested too deeply", "three levels"),
    ],
)
def test_unreadable_text(text: str, line: int | None, column: int | None, what: str, mend: str) -> None:
    problem = only(text)
    assert (problem.line, problem.column) == (line, column)
    assert what in problem.what
    assert mend in problem.mend


def test_an_alias_bomb_is_stopped() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for name, before in zip("bcdefgh", "abcdefg", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    problem = only("\n".join(lines))
    assert "more than 20,000 values" in problem.what
    assert problem.line == 1


# Bad files, each with one problem: text, place and path, a word of what, a word of the mend.

F = HEAD + "factors:\n  attention: [sdpa, eager]\n"  # four lines, valid as they are
APPENDED = [  # to F
    ("stpes: 3", "5:1 stpes", "unknown key", "did you mean steps?"),
    ("skip-records: 3", "5:1 skip-records", "unknown", "did you mean skip_records?"),
    ("batch_size: 8", "5:1 batch_size", "is a setting", "under settings"),
    ("command: [accelerate, launch]", "5:1 command", "only for trainer: command", "remove"),
    ("flags: {batch_size: [a]}", "5:1 flags", "only for trainer: command", "remove"),
    ("name: [a]", "5:1 name", "one value", "not a list"),
    ('model: ""', "5:8 model", "empty", "remove the line"),
    ("steps: 0", "5:8 steps", "'0' is not a whole number", "at least 1"),
    ("steps:", "5:7 steps", "empty", "write a value"),
    ("steps: '3'", "5:8 steps", "whole number", "without quotes"),
    ("steps: 3.0", "5:8 steps", "whole number", "at least 1"),
    ("steps: true", "5:8 steps", "whole number", "at least 1"),
    ("repeat: -1", "5:9 repeat", "'-1'", "at least 1"),
    ("skip_records: -1", "5:15 skip_records", "'-1'", "at least 0"),
    ("repeat: 010", "5:9 repeat", "octal", 'quote it: "010"'),
    ("records: [a, 0012]", "5:14 records[1]", "octal", 'quote it: "0012"'),
    ("records: []", "5:1 records", "empty", "list record ids"),
    ("records: utt17", "5:10 records", "must be a list", "[utt17, utt93]"),
    ("records: [a, [b]]", "5:14 records[1]", "one value", "not a list"),
    ("timeout: 10 minutes", "5:10 timeout", "'10 minutes' is not a duration", "1h30m"),
    ("timeout: 0", "5:10 timeout", "not a duration", "above zero"),
    ("device: gpu", "5:9 device", "not a device", "auto, cuda, cpu"),
    ("gpus_per_cell: 0", "5:16 gpus_per_cell", "number of GPUs", "or all"),
    ("trust_remote_code: on", "5:20 trust_remote_code", "'on'", "true or false"),
    ("trust_remote_code: yes", "5:20 trust_remote_code", "yes is a boolean", "true"),
    ("name: n", "5:7 name", "n is a boolean", 'quote it: "n"'),
    ("steps: 3\nsteps: 4", "6:1 steps", "given twice, first at line 5", "keep one"),
    ("  attention: [sdpa, flash]", "5:3 factors.attention", "given twice, first at line 4", "keep one"),
    ("? [x]\n: 1", "5:3 ?", "not a plain word", "plain word"),
    ("!!str x: 1", "5:1 ?", "not a plain word", "plain word"),
    ("settings: {<<: {seed: 1}}", "5:12 settings.?", "merge keys", "write the keys out"),
    ("name: !!python/name:os.system x", "5:7 name", "tag !!python/name", "remove the tag"),
    ("name: !!str 010", "5:7 name", "tag !!str", "remove the tag"),
    ("name: \"a\\0b\"", "5:7 name", "NUL", "escape"),
    ("name: \"\\ud800\"", "5:7 name", "surrogate", "escape"),
    ("settings: [seed]", "5:1 settings", "must be a mapping", "{precision: bf16}"),
    ("settings: {sed: 1}", "5:12 settings.sed", "unknown setting", "did you mean seed?"),
    ("settings: {zzz: 1}", "5:12 settings.zzz", "unknown", "known settings: attention,"),
    ("settings: {steps: 1}", "5:12 settings.steps", "unknown", "move it out"),
    ("settings: {batch_size: [1, 8]}", "5:12 settings.batch_size", "one value", "factors"),
    ("settings: {seed: }", "5:17 settings.seed", "empty", "write one"),
    ("settings: {precision: bf61}", "5:23 settings.precision", "'bf61'", "did you mean bf16?"),
    ("settings: {deterministic: true}", "5:27 settings.deterministic", "'true'", "one of off, kernels"),
    (
        "settings: {channel_weights: 1,8}",
        "5:31 settings.8", "unknown setting '8'", 'quote a value that holds commas: "1,8"',
    ),
    (
        "settings: {attention: sdpa}",
        "5:23 settings.attention", "both fixed and a factor", "remove it here or under factors",
    ),
    ("  batchsize: [1, 2]", "5:3 factors.batchsize", "unknown", "did you mean batch_size?"),
    ("  batch_size: 8", "5:15 factors.batch_size", "list of levels", "under settings"),
    ("  batch_size:", "5:14 factors.batch_size", "list of levels", "under settings"),
    (
        "  batch_size: [8]",
        "5:3 factors.batch_size", "one level", "put it under settings (batch_size: 8), or use --set",
    ),
    ("  batch_size: []", "5:3 factors.batch_size", "without levels", "list two levels"),
    ("  batch_size: [1, ~]", "5:19 factors.batch_size[1]", "empty", "write one"),
    ("  batch_size: [1, [2]]", "5:19 factors.batch_size[1]", "one value", "quote"),
    ("  batch_size: [1, 2, 1]", "5:22 factors.batch_size[2]", "same level as '1'", "remove"),
    (
        "  learning_rate: [1e-5, 0.00001]",
        "5:25 factors.learning_rate[1]", "'0.00001' is the same level as '1e-5'", "remove",
    ),
    ("  max_length: [none, none]", "5:22 factors.max_length[1]", "same level", "remove"),
    (
        "  gradient_checkpointing: [off, false]",
        "5:33 factors.gradient_checkpointing[1]", "'false' is the same level as 'off'", "remove",
    ),
    (
        "  channel_weights: [1,8, 1,32]",
        "5:3 factors.channel_weights", "comma", 'quote each level: ["1,8", "1,32"]',
    ),
    ("  channel_weights: [none, 1,8]", "5:3 factors.channel_weights", "comma", "quote"),
    ("exclude: {attention: eager}", "5:1 exclude", "list of rules", "exclude: [{"),
    ("exclude: [eager]", "5:11 exclude[0]", "a rule is a mapping", "{attention:"),
    (
        "exclude: [{attention: [sdpa, eager]}]",
        "5:12 exclude[0].attention", "one level", "one rule for each level",
    ),
    ("exclude: [{}]", "5:11 exclude[0]", "every cell", "remove the rule"),
    (
        "exclude: [{atention: eager}]",
        "5:12 exclude[0].atention", "unknown setting", "did you mean attention?",
    ),
    (
        "exclude: [{attention: flash}]",
        "5:23 exclude[0].attention", "no cell has attention=flash", "its levels: sdpa, eager",
    ),
    ("exclude: [{attention: flush}]", "5:23 exclude[0].attention", "'flush'", "flash"),
    ("exclude: [{precision: fp32}]", "5:23 exclude[0].precision", "neither", "add it there"),
    ("exclude:\n- {attention: sdpa}", "6:3 exclude[0]", "excludes the baseline", "list another level first"),
    ("exclude: [{attention: sdpa}, {attention: eager}]", "5:1 exclude", "every cell", "remove or narrow"),
    ("env: [A=1]", "5:1 env", "mapping of names to text", "{NAME:"),
    ("env: {A: [1]}", "5:7 env.A", "one value", "not a list"),
    ("env: {A: }", "5:9 env.A", "empty", "write a value"),
    ("env: {A=1: x}", "5:7 env.A=1", "name of a variable", "equals sign"),
]  # fmt: skip
WHOLE = [
    (
        "recipe: r.py\n" + BODY,
        "trainer", "trainer is missing", "trainer: sft",
    ),
    (
        "trainer:\nrecipe: r.py\n" + BODY,
        "1:9 trainer", "empty", "write a value",
    ),
    (
        "trainer: stf\n" + BODY,
        "1:10 trainer", "unknown trainer 'stf'", "did you mean sft?",
    ),
    (
        "trainer: command\ncommand: [x]\n" + BODY,
        "1:10 trainer", "'command'", "known trainers: sft",
    ),
    (
        "trainer: sft\nrecipe: causal_ml\n" + BODY,
        "2:9 recipe", "unknown recipe", "causal-lm",
    ),
    (
        "trainer: sft\n" + BODY,
        "recipe", "needs a recipe", "recipe: causal-lm",
    ),
    (
        "trainer: sft\nrecipe: my_tts.py\nfactors: {gradient_checkpointing: [off, Yes]}\n",
        "3:41 factors.gradient_checkpointing[1]", "Yes is a boolean", "write on",
    ),
    (
        "trainer: sft\nrecipe: my_tts.py\nfactors:\n  # later\nsteps: 3\n",
        "3:9 factors", "no factor", "--factor",
    ),
    ("trainer: sft\nrecipe: my_tts.py\n", "factors", "there is no factor", "--factor"),
    (
        "trainer: sft\nrecipe: my_tts.py\nfactors: [attention]\n",
        "3:1 factors", "must be a mapping", "[sdpa, eager]",
    ),
    (
        "trainer: sft\nrecipe: my_tts.py\nfactors:\n  attention:\n  - sdpa\n  - eager\n  - flahs\n",
        "7:5 factors.attention[2]",
        "'flahs' is not a level of attention",
        "did you mean flash? use one of eager, sdpa",
    ),
    (
        "trainer: sft\nrecipe: my_tts.py\nfactors: &f\n  attention: *f\n",
        "4:3 factors.attention", "contains itself", "write the value out",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "where", "what", "mend"),
    [*((f"{F}{tail}\n", *rest) for tail, *rest in APPENDED), *WHOLE],
    ids=[row[0] for row in (*APPENDED, *WHOLE)],
)
def test_bad_files(text: str, where: str, what: str, mend: str) -> None:
    problem = only(text)
    place = f"{problem.line}:{problem.column} " if problem.line else ""
    assert f"{place}{problem.path}" == where
    assert what in problem.what
    assert mend in problem.mend


def test_a_number_of_thousands_of_digits_is_refused_like_any_other() -> None:
    problem = only(f"{F}steps: {'9' * 5000}\n")
    assert (problem.path, problem.line, problem.column) == ("steps", 5, 8)


def test_many_combinations_are_no_problem_and_are_not_listed() -> None:
    levels = ", ".join(map(str, range(1, 300)))
    names = ("batch_size", "weight_decay", "gradient_accumulation", "learning_rate")
    text = HEAD + "factors:\n" + "".join(f"  {name}: [{levels}]\n" for name in names)
    assert read(text + "exclude: [{weight_decay: 1, batch_size: 2}]\n").combinations == 299**4
    problem = only(text + "settings: {precision: bf16}\nexclude: [{precision: bf16}]\n")
    assert "exclude every cell" in problem.what


def test_every_problem_is_reported_at_once_in_the_order_of_the_file() -> None:
    text = """\
steps: 0
setings: {}
settings: {precision: bf61, batch_size: [1, 8], seed: 010}
factors:
  gradient_checkpointing: [no, yes]
  learning_rate: [1e-5, 0.00001]
  atention: [sdpa, eager]
  channel_weights: [1,8, 1,32]
  param_dtype: fp32
  padding_side: [left]
exclude: [{attention: eager}, {}]
trust_remote_code: on
command: [x]
recipe: nothing
device: tpu
env: {A: {}}
"""
    found = problems(text, Overrides(steps=0, timeout="soon", settings=("max_length=x",)))
    assert [(problem.line, problem.path) for problem in found] == [
        (2, "setings"),
        (3, "settings.precision"),
        (3, "settings.batch_size"),
        (3, "settings.seed"),
        (5, "factors.gradient_checkpointing[0]"),
        (5, "factors.gradient_checkpointing[1]"),
        (6, "factors.learning_rate[1]"),
        (7, "factors.atention"),
        (8, "factors.channel_weights"),
        (9, "factors.param_dtype"),
        (10, "factors.padding_side"),
        (11, "exclude[0].attention"),
        (11, "exclude[1]"),
        (12, "trust_remote_code"),
        (13, "command"),
        (14, "recipe"),
        (15, "device"),
        (16, "env.A"),
        (None, "--steps 0"),
        (None, "--timeout soon"),
        (None, "trainer"),
        (None, "--set max_length=x"),
    ]
    assert all(problem.mend for problem in found)


def test_the_message_reads_well_and_shows_no_other_library() -> None:
    with pytest.raises(MatrixError) as caught:
        read(F + "stpes: 3\nsteps: [1]\n")
    assert str(caught.value).splitlines()[0] == "some/where/my.yaml: 2 problems"
    assert "  line 6, column 1: steps: must be one value" in str(caught.value)
    assert "pydantic" not in str(caught.value)


# What the trainer itself refuses.


def test_the_trainers_own_problems_get_their_place() -> None:
    text = F.replace("my_tts.py", "causal-lm") + "settings:\n  channel_weights: 1,8\n"
    problem = only(text)
    assert (problem.path, problem.line, problem.column) == ("settings.channel_weights", 6, 20)
    assert "one channel" in problem.what


def test_the_trainer_is_asked_about_valid_matrices_only_and_sees_the_whole() -> None:
    seen = []

    def check(matrix: Matrix) -> list[tuple[str, str, str]]:
        seen.append(matrix)
        return [("factors.size[1]", "too large", "smaller"), ("elsewhere", "odd", "even")]

    vocabulary = Vocabulary({"size": Setting("size", "", int, "1")}, check=check)
    with pytest.raises(MatrixError):
        read("trainer: sft\nfactors: {size: [1, x]}\n", vocabulary=vocabulary)
    assert not seen
    with pytest.raises(MatrixError) as caught:
        read("trainer: sft\nrecipe: anything\nfactors: {size: [1, 2]}\n", vocabulary=vocabulary)
    assert [str(problem) for problem in caught.value.problems] == [
        "line 3, column 21: factors.size[1]: too large (smaller)",
        "elsewhere: odd (even)",
    ]
    assert seen[0].factors == (Factor("size", ("1", "2")),)


# The command line.


def test_flags_replace_what_the_file_says() -> None:
    overrides = Overrides(
        model="/models/m",
        data="d.jsonl",
        steps=5,
        repeat=2,
        timeout="2h",
        device="cpu",
        settings=("batch_size=4", "channel_weights=1,8", "seed = 7"),
        factors=("precision=bf16|fp32", "attention = eager | sdpa:math"),
    )
    matrix = read(DESIGN, overrides)
    assert (matrix.model, matrix.data, matrix.steps, matrix.repeat) == ("/models/m", "d.jsonl", 5, 2)
    assert (matrix.timeout, matrix.device) == (7200.0, "cpu")
    assert matrix.factors == (
        Factor("gradient_checkpointing", ("off", "on")),
        Factor("attention", ("eager", "sdpa:math")),
        Factor("precision", ("bf16", "fp32")),
    )
    assert matrix.settings == {
        "learning_rate": "2e-5",
        "gradient_accumulation": "4",
        "batch_size": "4",
        "channel_weights": "1,8",
        "seed": "7",
    }


def test_flags_mend_what_is_wrong_in_the_file() -> None:
    text = "trainer: sft\nrecipe: r.py\nsteps: 0\nsettings:\nfactors:\n"
    matrix = read(text, Overrides(steps=2, factors=("gradient_checkpointing=false|true",)))
    assert matrix.steps == 2
    assert matrix.factors == (Factor("gradient_checkpointing", ("off", "on")),)


@pytest.mark.parametrize(
    ("overrides", "path", "what", "mend"),
    [
        (Overrides(settings=("batch_size=x",)), "--set batch_size=x", "'x' is not a level", "whole number"),
        (Overrides(settings=("batch_size",)), "--set batch_size", "no name and value", "--set NAME=VALUE"),
        (Overrides(settings=("=3",)), "--set =3", "no name and value", "--set NAME=VALUE"),
        (
            Overrides(settings=("bach_size=1",)),
            "--set bach_size=1",
            "unknown setting",
            "did you mean batch_size?",
        ),
        (Overrides(settings=("steps=1",)), "--set steps=1", "unknown setting", "key of the matrix"),
        (Overrides(settings=("seed=1", "seed=2")), "--set seed=2", "given twice", "keep one"),
        (Overrides(settings=("batch_size=",)), "--set batch_size=", "'' is not a level", "whole number"),
        (
            Overrides(settings=("seed=1",), factors=("seed=1|2",)),
            "--set seed=1",
            "both fixed and a factor",
            "remove it",
        ),
        (Overrides(factors=("batch_size=1,2",)), "--factor batch_size=1,2", "one level", "split levels at |"),
        (Overrides(factors=("batch_size=",)), "--factor batch_size=", "without levels", "split levels at |"),
        (Overrides(factors=("batch_size=1|x",)), "--factor batch_size=1|x", "'x' is not", "whole number"),
        (Overrides(factors=("batch_size=1|1",)), "--factor batch_size=1|1", "same level", "remove"),
        (Overrides(factors=("batch_size",)), "--factor batch_size", "no name", "--factor 'NAME=SAFE|OTHER'"),
        (Overrides(factors=("btch=1|2",)), "--factor btch=1|2", "unknown setting", "known settings"),
        (Overrides(steps=0), "--steps 0", "whole number", "at least 1"),
        (Overrides(repeat=-1), "--repeat -1", "whole number", "at least 1"),
        (Overrides(timeout="soon"), "--timeout soon", "not a duration", "10m"),
        (Overrides(device="gpu"), "--device gpu", "not a device", "auto, cuda, cpu"),
        (Overrides(model=" "), "--model-path  ", "empty", "write a value"),
    ],
)
def test_bad_flags_are_named_and_have_no_line(overrides: Overrides, path: str, what: str, mend: str) -> None:
    problem = only(HEAD + BODY, overrides)
    assert (problem.path, problem.line, problem.column) == (path, None, None)
    assert what in problem.what
    assert mend in problem.mend


def test_fixing_the_only_factor_leaves_none() -> None:
    problem = only(F, Overrides(settings=("attention=sdpa",)))
    assert (problem.path, problem.line) == ("factors", 3)


def test_rules_survive_flags_that_make_them_idle() -> None:
    text = F + "  batch_size: [1, 2]\nexclude: [{attention: eager, batch_size: 2}]\n"
    assert len(expand(read(text))) == 3
    assert len(expand(read(text, Overrides(settings=("attention=sdpa",))))) == 2
    assert len(expand(read(text, Overrides(settings=("attention=eager",))))) == 1
    assert len(expand(read(text, Overrides(factors=("attention=sdpa|flash",))))) == 4


def test_flags_over_a_section_of_the_wrong_shape_do_not_hide_it() -> None:
    found = problems(HEAD + "settings: [a]\nfactors: 3\n", Overrides(settings=("seed=1",), factors=("attention=a|b",)))
    assert [(problem.path, problem.line) for problem in found] == [("settings", 3), ("factors", 4)]


def test_every_flag_is_a_key_and_every_key_a_word_of_the_matrix() -> None:
    assert set(FLAGS) <= set(KEYS)
    assert set(KEYS) == set(Matrix.__dataclass_fields__) - {"folder"}


# Durations and JSON.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1h 30m 5s", 5405),
        ("45", 45),
        ("1.5m", 90),
        ("0.5", 0.5),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "0", "0s", "-5", "10x", "1.2.3m", ".m", "nan", "inf", "1e999", "5m1h", "10 minutes"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="90s, 10m, 1h30m"):
        parse_duration(text)


def test_json_round_trip() -> None:
    several = HEAD + "gpus_per_cell: all\ntimeout: 1.5s\n" + BODY
    for matrix in (read(DESIGN), read(several, vocabulary=SEVERAL_GPUS)):
        text = json.dumps(matrix_to_json(matrix), allow_nan=False)
        assert matrix_from_json(json.loads(text)) == matrix


@pytest.mark.parametrize("data", [{}, {"factors": 3}, {"factors": [], "nme": "x"}, {"factors": [{"name": "x"}]}])
def test_json_that_is_no_matrix(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a matrix"):
        matrix_from_json(data)


# Properties.

LEVELS = {
    "attention": ["sdpa", "eager", "flash", "sdpa:math"],
    "gradient_checkpointing": ["off", "on", "reentrant"],
    "batch_size": ["1", "2", "8"],
    "channel_weights": ["1,8", "1,32", "none"],
    "learning_rate": ["2e-5", "1.0E-3", "0"],
    "precision": ["bf16", "fp16", "fp32"],
}


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, list[str]], list[dict[str, str]]]:
    """Factors with two levels or more, and rules that leave the baseline alone."""
    names = draw(st.lists(st.sampled_from(sorted(LEVELS)), min_size=1, max_size=4, unique=True))
    subsets = {name: st.lists(st.sampled_from(LEVELS[name]), min_size=2, max_size=4, unique=True) for name in names}
    factors = {name: draw(subset) for name, subset in subsets.items()}
    rules = []
    for _ in range(draw(st.integers(0, 3))):
        named = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        rule = {name: draw(st.sampled_from(factors[name])) for name in named}
        if any(level != factors[name][0] for name, level in rule.items()):
            rules.append(rule)
    return factors, rules


def written(factors: dict[str, list[str]], rules: list[dict[str, str]]) -> str:
    content = {"trainer": "sft", "recipe": "r.py", "factors": factors, "exclude": rules}
    return yaml.safe_dump(content, sort_keys=False)


@settings(max_examples=60, deadline=None)
@given(files(), st.randoms(use_true_random=False))
def test_cells_are_the_product_minus_the_exclusions(
    file: tuple[dict[str, list[str]], list[dict[str, str]]], shuffle: random.Random
) -> None:
    factors, rules = file
    matrix = read(written(factors, rules))
    assert {factor.name: list(factor.levels) for factor in matrix.factors} == factors  # the spelling is kept
    cells = expand(matrix)
    assert len(cells) + len(list(excluded(matrix))) == matrix.combinations
    for rule in rules:
        assert not any(rule.items() <= cell.levels.items() for cell in cells)
    ids = [cell.id for cell in cells]
    assert len(set(ids)) == len({cell.slug for cell in cells}) == len(ids)
    names = list(factors)
    shuffle.shuffle(names)
    other = read(written({name: factors[name] for name in names}, rules))
    assert {cell.id for cell in expand(other)} == set(ids)
    assert matrix_from_json(json.loads(json.dumps(matrix_to_json(matrix)))) == matrix


PIECES = [
    "a",
    "1",
    "[",
    "]",
    "{",
    "}",
    ":",
    ": ",
    "\n",
    "- ",
    "  ",
    "&x ",
    "*x",
    "!",
    "'",
    '"',
    "#",
    ",",
    "|",
    "? ",
    "<<",
    "~",
    "\t",
]


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from([*PIECES, *KEYS]), max_size=12).map("".join)))
def test_any_text_is_a_matrix_or_a_matrix_error(text: str) -> None:
    for full in (text, HEAD + BODY + text, HEAD + "settings: {seed: " + text + "}\n" + BODY):
        try:
            read(full)
        except MatrixError as error:
            assert error.problems
