"""YAML text -> Matrix: every problem at once, each with line, column, path and the mend.

The text is read as YAML 1.2 core from PyYAML's node graph, because its loader reads `1e-5` as text, `no`
as false, `010` as 8 and keeps the last of two equal keys. pydantic looks at the shape; what depends on
the trainer is checked here against its vocabulary. Levels and settings keep the spelling of the file.
Flags of the command line are laid over the tree before anything is checked, so one set of checks serves
both. No file, clock or environment is touched: paths stay as written.

A path is 0-based, `factors.attention[2]`. A plain value is reported where it stands, a list or a mapping
where its key stands.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, Union

import yaml
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from nanbisect.errors import MatrixError, Problem
from nanbisect.matrix import Factor, Matrix, Setting, Vocabulary, excluded, is_excluded
from nanbisect.outcome import jsonable

MOST_COMBINATIONS = 20_000
MOST_NODES = 20_000
DEEPEST = 20
DEVICES = ("auto", "cuda", "cpu")
SWITCH = {"true": "on", "false": "off"}

TreePath = tuple[str | int, ...]
Tree = Union["Scalar", "dict[str, Tree]", "list[Tree]"]


@dataclass(frozen=True)
class Overrides:
    """What the command line says over the matrix file; None is "not said".

    `settings` holds `k=v` from `--set`, `factors` holds `k=a|b` from `--factor`.
    """

    model: str | None = None
    data: str | None = None
    steps: int | None = None
    repeat: int | None = None
    timeout: str | None = None
    device: str | None = None
    gpus_per_cell: int | str | None = None
    settings: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()


NO_OVERRIDES = Overrides()
FLAGS = {
    "model": "--model-path",
    "data": "--train-jsonl",
    "steps": "--steps",
    "repeat": "--repeat",
    "timeout": "--timeout",
    "device": "--device",
    "gpus_per_cell": "--gpus-per-cell",
}


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
    findings = _Findings()
    try:
        tree = _overlay(_parse(text, findings), overrides, findings)
    except _UnreadableError as error:
        raise MatrixError(source, [error.problem]) from None
    shape = _shape(tree, findings, vocabularies)
    vocabulary = _vocabulary(shape, findings, vocabularies)
    matrix = _Check(shape, findings, vocabulary).matrix(PurePath(source).stem or "matrix", folder)
    if vocabulary and not findings.touch(("factors",), ("settings",), ("exclude",)):
        for path, what, mend in (*_excluded_too_much(matrix), *vocabulary.check(matrix)):
            findings.add(findings.path(path), what, mend)
    if findings.problems:
        raise MatrixError(source, findings.problems)
    return matrix


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


def matrix_to_json(matrix: Matrix) -> dict[str, Any]:
    """Plain JSON values, for `run.json`."""
    return dict(jsonable(asdict(matrix)))


def matrix_from_json(data: Mapping[str, Any]) -> Matrix:
    """The inverse of `matrix_to_json`. Raises ValueError for anything else."""
    try:
        factors = tuple(Factor(item["name"], tuple(item["levels"])) for item in data["factors"])
        lists = {name: tuple(data.get(name, ())) for name in ("exclude", "records")}
        return Matrix(**{**data, **lists, "factors": factors})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a matrix: {error}") from error


# Findings: where everything stands, and what is wrong with it.


@dataclass(frozen=True)
class _Place:
    """Line and column from 1; or `shown`, the flag that said it."""

    line: int | None = None
    column: int | None = None
    shown: str = ""

    @classmethod
    def of(cls, node: yaml.Node) -> _Place:
        return cls(node.start_mark.line + 1, node.start_mark.column + 1)


class _Findings:
    """The place of every path, and the first problem of each: later checks need not mind earlier ones."""

    def __init__(self) -> None:
        self.places: dict[TreePath, _Place] = {}
        self.keys: dict[TreePath, _Place] = {}
        self._problems: dict[TreePath, Problem] = {}

    def add(self, path: TreePath, what: str, mend: str, *, at: _Place | None = None) -> None:
        """Note a problem, by default where the value of `path` stands."""
        place = at or self.places.get(path, _Place())
        problem = Problem(place.shown or _shown(path), what, mend, place.line, place.column)
        self._problems.setdefault(path, problem)

    def add_at_key(self, path: TreePath, what: str, mend: str) -> None:
        """Note a problem with the key itself."""
        self.add(path, what, mend, at=self.keys.get(path))

    def touch(self, *paths: TreePath) -> bool:
        """Whether a problem lies above, at or under one of the paths."""
        pairs = ((path, bad) for path in paths for bad in self._problems)
        return any(path[: len(bad)] == bad[: len(path)] for path, bad in pairs)

    def path(self, shown: str) -> TreePath:
        """The path that is shown as this text."""
        return next((path for path in self.places if _shown(path) == shown), (shown,))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """In the order of the file; those without a line last."""
        order = ((p.line is None, p.line or 0, p.column or 0, p) for p in self._problems.values())
        return tuple(item[-1] for item in sorted(order, key=lambda item: item[:-1]))


class _UnreadableError(Exception):
    """Text that holds no tree to look at; one problem is all that can be said."""

    def __init__(self, what: str, mend: str, place: _Place | None = None) -> None:
        place = place or _Place()
        self.problem = Problem("", what, mend, place.line, place.column)
        super().__init__(what)


def _shown(path: TreePath) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean x? `, or nothing; case and hyphens are forgiven."""
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1)
    return f"did you mean {close[0]}? " if close else ""


# From text to a tree.

CORE_TAG = "core:"
CORE = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
}
SYNTAX_MENDS = {
    "'\\t'": "indent with spaces, not tabs",
    "mapping values": "one key a line; quote text that holds a colon",
    "expected ':'": "write a colon and a space after the key",
    "expected ',' or": "close the bracket or brace, and put a comma between entries",
    "end of stream": "close the quote",
    "undefined alias": "quote text that starts with *",
    "single document": "keep one matrix in a file: remove the --- line",
    "cannot start any token": "quote the text",
}


@dataclass(frozen=True)
class Scalar:
    """A plain value as spelled. `kind` is null, bool, int, float or str; quoted text is not `plain`."""

    text: str
    kind: str
    plain: bool = False


NULL = Scalar("", "null")


class _Loader(yaml.BaseLoader):
    """Composes nodes with the core kinds as tags, so that any other tag was written in the file."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return CORE_TAG + (_kind(value) if implicit[0] else "str")
        return CORE_TAG + "node"


def _kind(text: str) -> str:
    return next((kind for kind, rule in CORE.items() if rule.fullmatch(text)), "str")


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!", 1)


def _parse(text: str, findings: _Findings) -> dict[str, Tree]:
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad:
        before = text[: bad.start()].split("\n")
        mend = "save the file as plain UTF-8 text"
        raise _UnreadableError(
            f"the character {bad.group()!r} is not allowed", mend, _Place(len(before), len(before[-1]) + 1)
        )
    node = _compose(text)
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        raise _UnreadableError("the file is empty", "start with trainer: sft and a list of factors")
    if not isinstance(node, yaml.MappingNode):
        what, mend = "the file is not a mapping of keys to values", "write lines such as trainer: sft"
        raise _UnreadableError(what, mend, _Place.of(node))
    return _Walker(findings).mapping(node, ())


def _compose(text: str) -> yaml.Node | None:
    try:
        return _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _Place(mark.line + 1, mark.column + 1) if mark else None
        problem = " ".join(filter(None, (error.context, error.problem)))
        mends = (mend for part, mend in SYNTAX_MENDS.items() if part in problem)
        mend = next(mends, "look at the indentation, colons and quotes here")
        raise _UnreadableError(f"not YAML: {problem}", mend, place) from None
    except RecursionError:
        raise _UnreadableError("nested too deeply", "a matrix needs three levels of nesting") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets "\UFFFFFFFF" through to chr()
        raise _UnreadableError(f"not YAML: {error}", "look at the escapes in quoted text") from None


class _Walker:
    """Turns nodes into a tree; writes down every place and what YAML readers disagree about."""

    def __init__(self, findings: _Findings) -> None:
        self._findings = findings
        self._count = 0
        self._open: set[int] = set()

    def mapping(self, node: yaml.MappingNode, path: TreePath) -> dict[str, Tree]:
        """Values by key; of two equal keys the first is kept."""
        tree: dict[str, Tree] = {}
        for key, value in node.value:
            if not self._usable(key, path):
                continue
            here = (*path, str(key.value))
            if key.value in tree:
                what = f"given twice, first at line {self._findings.keys[here].line}"
                self._findings.add(here, what, "keep one of them", at=_Place.of(key))
                continue
            self._findings.keys[here] = _Place.of(key)
            tree[key.value] = self._value(value, here)
        return tree

    def _usable(self, key: yaml.Node, path: TreePath) -> bool:
        here, place = (*path, "?"), _Place.of(key)
        if not isinstance(key, yaml.ScalarNode) or not key.tag.startswith(CORE_TAG):
            self._findings.add(here, "a key is not a plain word", "write one plain word as the key", at=place)
            return False
        if key.value == "<<" and key.style is None:
            self._findings.add(here, "merge keys (<<) are not part of YAML 1.2", "write the keys out", at=place)
            return False
        return True

    def _value(self, node: yaml.Node, path: TreePath) -> Tree:
        self._place(node, path)
        if id(node) in self._open:
            self._findings.add(path, "an alias that contains itself", "write the value out")
            return NULL
        if not node.tag.startswith(CORE_TAG):
            self._findings.add(path, f"the tag {_short(node.tag)} is not allowed", "remove the tag")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._open.add(id(node))
        tree = self._inside(node, path)
        self._open.remove(id(node))
        return tree

    def _inside(self, node: yaml.Node, path: TreePath) -> Tree:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]

    def _place(self, node: yaml.Node, path: TreePath) -> None:
        self._count += 1
        own = _Place.of(node)
        if self._count > MOST_NODES:
            what = f"more than {MOST_NODES:,} values"
            raise _UnreadableError(what, "shorten the file; aliases (*name) count each time", own)
        if len(path) > DEEPEST:
            raise _UnreadableError("nested too deeply", "a matrix needs three levels of nesting", own)
        self._findings.places[path] = own if isinstance(node, yaml.ScalarNode) else self._findings.keys.get(path, own)

    def _scalar(self, node: yaml.ScalarNode, path: TreePath) -> Scalar:
        text = node.value
        scalar = Scalar(text, node.tag.removeprefix(CORE_TAG), plain=node.style is None)
        if re.search("[\0\ud800-\udfff]", text):
            what = "the text holds a NUL or half a surrogate pair"
            self._findings.add(path, what, "remove the \\0 or \\u escape")
        if scalar.plain and re.fullmatch(r"(?i)yes|no|y|n", text):
            on, true = ("on", "true") if text[0] in "yY" else ("off", "false")
            what = f"{text} is a boolean to some YAML readers and text to others"
            self._findings.add(path, what, f'write {on} for a switch, {true} for a boolean, or quote it: "{text}"')
        if scalar.plain and re.fullmatch(r"[-+]?0[0-9]+", text):
            what = f"{text} is octal to some YAML readers and decimal to others"
            self._findings.add(path, what, f'drop the leading zero, or quote it: "{text}"')
        return scalar


# The command line over the tree.


def _overlay(tree: dict[str, Tree], overrides: Overrides, findings: _Findings) -> dict[str, Tree]:
    """The tree as if the flags had been written in it; their places say which flag."""
    for key, flag in FLAGS.items():
        value = getattr(overrides, key)
        if value is not None:
            tree = {**tree, key: Scalar(str(value), _kind(str(value)))}
            findings.places[(key,)] = _Place(shown=f"{flag} {value}")
    fixed = _pairs("--set", overrides.settings, findings)
    varied = _pairs("--factor", overrides.factors, findings)
    settings: dict[str, Tree] = {name: Scalar(text, "str") for name, text in fixed.items()}
    factors: dict[str, Tree] = {name: _levels(text) for name, text in varied.items()}
    _mark("settings", "--set", fixed, findings)
    _mark("factors", "--factor", varied, findings)
    sections = {
        "settings": _merged(tree.get("settings"), settings, gone=factors),
        "factors": _merged(tree.get("factors"), factors, gone=settings),
    }
    return {**tree, **sections}


def _pairs(flag: str, items: Sequence[str], findings: _Findings) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        name, equals, text = (part.strip() for part in item.partition("="))
        if not name or not equals:
            value = "'NAME=SAFE|OTHER'" if flag == "--factor" else "NAME=VALUE"
            findings.add((f"{flag} {item}",), "no name and value", f"write {flag} {value}")
        elif name in pairs:
            findings.add((f"{flag} {item}",), f"{name} is given twice", "keep one of them")
        else:
            pairs[name] = text
    return pairs


def _levels(text: str) -> list[Tree]:
    return [Scalar(level.strip(), "str") for level in text.split("|")] if text else []


def _mark(section: str, flag: str, pairs: Mapping[str, str], findings: _Findings) -> None:
    for name, text in pairs.items():
        place = _Place(shown=f"{flag} {name}={text}")
        path: TreePath = (section, name)
        findings.keys[path] = place
        for item in (path, *((*path, index) for index in range(text.count("|") + 1))):
            findings.places[item] = place


def _merged(section: Tree | None, added: dict[str, Tree], *, gone: Iterable[str]) -> Tree:
    if section is None or _is_null(section):
        section = {}
    if not isinstance(section, dict):
        return section
    return {**{name: value for name, value in section.items() if name not in gone}, **added}


# The shape of the file. Validators say what and mend; pydantic finds them all, with their paths.


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


class _Shape(BaseModel):
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
    command: Any = None
    flags: Any = None


KEYS = tuple(_Shape.model_fields)
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
    ("records", 1): ("must be a list of record ids", "write records: [utt17, utt93]"),
    ("env", 1): ("must be a mapping of names to text", 'write env: {NAME: "value"}'),
}


def _shape(tree: dict[str, Tree], findings: _Findings, vocabularies: Mapping[str, Vocabulary]) -> _Shape:
    """The file with its types; what has a problem is left out, so that the rest can be checked, too."""
    tree = {key: value for key, value in tree.items() if not (key in MAY_BE_EMPTY and _is_null(value))}
    try:
        return _Shape.model_validate(tree)
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
        return _Shape.model_validate(_without(tree, bad))


def _is_null(value: Tree) -> bool:
    return isinstance(value, Scalar) and value.kind == "null"


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
    return f"unknown key {key!r}", f"{_did_you_mean(key, KEYS)}known keys: {', '.join(KEYS)}"


# The checks that need the trainer's vocabulary.


def _vocabulary(shape: _Shape, findings: _Findings, known: Mapping[str, Vocabulary]) -> Vocabulary | None:
    """The trainer's words. Without a trainer the suggested one is assumed, to say all there is to say."""
    if shape.trainer is None:
        first = next(iter(known))
        findings.add(("trainer",), "the trainer is missing", f"add the line trainer: {first}")
        return known[first]
    if shape.trainer not in known:
        mend = f"{_did_you_mean(shape.trainer, known)}known trainers: {', '.join(known)}"
        findings.add(("trainer",), f"unknown trainer {shape.trainer!r}", mend)
    return known.get(shape.trainer)


def _excluded_too_much(matrix: Matrix) -> Iterable[tuple[str, str, str]]:
    """The rules of a valid matrix that leave nothing to compare."""
    if sum(1 for _ in excluded(matrix)) == matrix.combinations:
        yield "exclude", "the rules exclude every cell", "remove or narrow a rule"
        return
    for index, rule in enumerate(matrix.exclude):
        alone = Matrix(matrix.name, matrix.trainer, matrix.factors, matrix.settings, (rule,))
        if is_excluded(alone, matrix.baseline):
            what = "the rule excludes the baseline, the cell of all first levels"
            yield f"exclude[{index}]", what, "narrow the rule, or list another level first"


@dataclass(frozen=True)
class _Check:
    """Checks a shape against a vocabulary (None: an unknown trainer's, so names and levels pass)."""

    shape: _Shape
    findings: _Findings
    vocabulary: Vocabulary | None

    def matrix(self, name: str, folder: str) -> Matrix:
        """The matrix of all that passed; `name` is for a file that has none."""
        self._keys()
        factors = {name: self._factor(name, levels) for name, levels in self.shape.factors.items()}
        self._size(factors)
        settings = {name: self._fixed(name, value) for name, value in self.shape.settings.items()}
        given = self.shape.model_dump(include=set(KEYS) - {"factors", "settings", "exclude", "command", "flags"})
        changed = {
            "name": self.shape.name or name,
            "trainer": self.shape.trainer or "",
            "records": tuple(self.shape.records or ()),
            "factors": tuple(Factor(name, tuple(levels)) for name, levels in factors.items()),
            "settings": settings,
            "exclude": self._rules(factors, settings),
        }
        return Matrix(**{**given, **changed}, folder=folder)

    def _keys(self) -> None:
        for key in ("command", "flags"):
            if self.vocabulary and getattr(self.shape, key) is not None:
                self.findings.add_at_key((key,), f"{key} is only for trainer: command", "remove it")
        if self.shape.records == []:
            self.findings.add(("records",), "the list is empty", "list record ids, or remove the line")
        for name in self.shape.env:
            if not name or "=" in name:
                mend = "write a name without an equals sign"
                self.findings.add_at_key(("env", name), f"{name!r} can't be the name of a variable", mend)
        recipes, recipe = self.vocabulary.recipes if self.vocabulary else (), self.shape.recipe
        if recipe and recipes and recipe not in recipes and not recipe.endswith(".py"):
            mend = f"{_did_you_mean(recipe, recipes)}use {', '.join(recipes)}, or the path of a .py file"
            self.findings.add(("recipe",), f"unknown recipe {recipe!r}", mend)

    def _size(self, factors: Mapping[str, Sequence[str]]) -> None:
        path: TreePath = ("factors",)
        combinations = math.prod(len(levels) for levels in factors.values())
        if not factors and not self.findings.touch(path):
            mend = "list at least one under factors, or use --factor 'NAME=SAFE|OTHER'"
            self.findings.add(path, "there is no factor", mend)
        if combinations > MOST_COMBINATIONS:
            what = f"{combinations:,} combinations are more than {MOST_COMBINATIONS:,}"
            self.findings.add(path, what, "fewer factors or levels")

    def _known(self, path: TreePath, name: str) -> Setting | None:
        """The setting, or a problem at its key (and None) if the trainer has none of that name."""
        if self.vocabulary is None:
            return Setting(name, "", str, "")
        setting = self.vocabulary.settings.get(name)
        if setting is None:
            self.findings.add_at_key(path, f"unknown setting {name!r}", self._unknown(path, name))
        return setting

    def _unknown(self, path: TreePath, name: str) -> str:
        known = self.vocabulary.settings if self.vocabulary else ()
        if CORE["float"].fullmatch(name):
            return 'quote a value that holds commas: "1,8"'
        if name in KEYS:
            return f"{name} is a key of the matrix itself: move it out of {path[0]}"
        return f"{_did_you_mean(name, known)}known settings: {', '.join(known)}"

    def _level(self, path: TreePath, setting: Setting, scalar: Scalar) -> tuple[str, Any]:
        """A level's text (a switch's as on/off) and its value; its value is None after a problem."""
        if scalar.kind == "null":
            self.findings.add(path, "the value is empty", "write one; for no value, where a setting has it, none")
            return scalar.text, None
        switched = SWITCH.get(scalar.text.lower(), "")
        text = switched if switched in setting.choices else scalar.text
        try:
            return text, setting.parse(text)
        except ValueError as error:
            mend = f"{_did_you_mean(text, setting.choices)}use {error}"
            self.findings.add(path, f"{text!r} is not a level of {setting.name}", mend)
            return text, None

    def _fixed(self, name: str, scalar: Scalar) -> str:
        path: TreePath = ("settings", name)
        setting = self._known(path, name)
        if setting is None:
            return scalar.text
        if name in self.shape.factors:
            self.findings.add(path, f"{name} is both fixed and a factor", "remove it here or under factors")
        return self._level(path, setting, scalar)[0]

    def _factor(self, name: str, levels: Sequence[Scalar]) -> list[str]:
        path: TreePath = ("factors", name)
        setting = self._known(path, name)
        if setting is None:
            return [scalar.text for scalar in levels]
        if name == "channel_weights" and _unquoted_weights(levels):
            what = "YAML reads a comma in a list as the end of a level"
            self.findings.add(path, what, 'quote each level: ["1,8", "1,32"]')
            return [scalar.text for scalar in levels]
        if len(levels) < 2:
            what = "a factor with one level" if levels else "a factor without levels"
            self.findings.add(path, what, self._lone_mend(path, levels))
            return [scalar.text for scalar in levels]
        return self._distinct(path, setting, levels)

    def _lone_mend(self, path: TreePath, levels: Sequence[Scalar]) -> str:
        if self._flagged(path):
            return f"split levels at |: --factor '{path[1]}=SAFE|OTHER'; or fix it with --set"
        fixed = f"{path[1]}: {levels[0].text}" if levels else "one value"
        return f"list two levels or more, the safe one first; or put it under settings ({fixed}), or use --set"

    def _flagged(self, path: TreePath) -> bool:
        return bool(self.findings.places.get(path, _Place()).shown)

    def _distinct(self, path: TreePath, setting: Setting, levels: Sequence[Scalar]) -> list[str]:
        seen: list[tuple[str, Any]] = []
        for index, scalar in enumerate(levels):
            here = (*path, index)
            text, value = self._level(here, setting, scalar)
            same = next((other for other, earlier in seen if text == other or _equal(value, earlier)), None)
            if same is not None:
                self.findings.add(here, f"{scalar.text!r} is the same level as {same!r}", "remove one of them")
            seen.append((text, value))
        return [text for text, _ in seen]

    def _rules(
        self, factors: Mapping[str, Sequence[str]], settings: Mapping[str, str]
    ) -> tuple[Mapping[str, str], ...]:
        """The rules of `exclude`, in the spelling of the factors and settings they name."""
        levels = {**{name: (text,) for name, text in settings.items()}, **factors}
        rules = []
        for index, rule in enumerate(self.shape.exclude):
            if not rule:
                mend = "name a setting and a level, or remove the rule"
                self.findings.add(("exclude", index), "an empty rule excludes every cell", mend)
            paths = {name: ("exclude", index, name) for name in rule}
            rules.append({name: self._named(paths[name], scalar, levels) for name, scalar in rule.items()})
        return tuple(rules)

    def _named(self, path: TreePath, scalar: Scalar, levels: Mapping[str, Sequence[str]]) -> str:
        """The level that a rule means. A fixed setting may have another one, for the sake of `--set`."""
        name = str(path[-1])
        setting = self._known(path, name)
        if setting is None:
            return scalar.text
        text, value = self._level(path, setting, scalar)
        for level in levels.get(name, ()):
            if text == level or _equal(value, _value(setting, level)):
                return level
        factor: TreePath = ("factors", name)
        if name not in levels and not self.findings.touch(factor, ("settings", name)):
            mend = "add it there, or remove it from the rule"
            self.findings.add(path, f"{name} is neither under factors nor under settings", mend)
        elif name in self.shape.factors and not self._flagged(factor) and not self.findings.touch(factor):
            mend = f"{_did_you_mean(text, levels[name])}its levels: {', '.join(levels[name])}"
            self.findings.add(path, f"no cell has {name}={text}", mend)
        return text


def _unquoted_weights(levels: Sequence[Scalar]) -> bool:
    """Whether levels such as 1,8 fell apart into numbers (`none` may stand among them)."""
    numbers = [scalar.plain and scalar.kind in ("int", "float") for scalar in levels]
    rest = [scalar for scalar, number in zip(levels, numbers, strict=True) if not number]
    return any(numbers) and all(scalar.text == "none" for scalar in rest)


def _value(setting: Setting, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError:
        return None


def _equal(value: Any, other: Any) -> bool:
    """Equal values; None (a level of its own, or one that failed) equals nothing."""
    return value is not None and other is not None and bool(value == other)
