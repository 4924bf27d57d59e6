"""YAML text -> a tree with places, and the findings about it.

The text is read as YAML 1.2 core from PyYAML's node graph, because its loader reads `1e-5` as text, `no`
as false, `010` as 8 and keeps the last of two equal keys. Values keep the spelling of the file.

A path is 0-based, `factors.attention[2]`. A plain value is reported where it stands, a list or a mapping
where its key stands.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Union

import yaml

from nanbisect.errors import Problem

MOST_NODES = 20_000
DEEPEST = 20

TreePath = tuple[str | int, ...]
Tree = Union["Scalar", "dict[str, Tree]", "list[Tree]"]


# Findings: where everything stands, and what is wrong with it.


@dataclass(frozen=True)
class Place:
    """Line and column from 1; or `shown`, the flag that said it."""

    line: int | None = None
    column: int | None = None
    shown: str = ""

    @classmethod
    def of(cls, node: yaml.Node) -> Place:
        """Where the node begins."""
        return cls(node.start_mark.line + 1, node.start_mark.column + 1)


class Findings:
    """The place of every path, and the first problem of each: later checks need not mind earlier ones."""

    def __init__(self) -> None:
        self.places: dict[TreePath, Place] = {}
        self.keys: dict[TreePath, Place] = {}
        self._problems: dict[TreePath, Problem] = {}

    def add(self, path: TreePath, what: str, mend: str, *, at: Place | None = None) -> None:
        """Note a problem, by default where the value of `path` stands."""
        place = at or self.places.get(path, Place())
        problem = Problem(place.shown or shown_path(path), what, mend, place.line, place.column)
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
        return next((path for path in self.places if shown_path(path) == shown), (shown,))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """In the order of the file; those without a line last."""
        order = ((p.line is None, p.line or 0, p.column or 0, p) for p in self._problems.values())
        return tuple(item[-1] for item in sorted(order, key=lambda item: item[:-1]))


class UnreadableError(Exception):
    """Text that holds no tree to look at; one problem is all that can be said."""

    def __init__(self, what: str, mend: str, place: Place | None = None) -> None:
        place = place or Place()
        self.problem = Problem("", what, mend, place.line, place.column)
        super().__init__(what)


def shown_path(path: TreePath) -> str:
    """`factors.attention[2]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def did_you_mean(word: str, known: Iterable[str]) -> str:
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
            return CORE_TAG + (kind_of(value) if implicit[0] else "str")
        return CORE_TAG + "node"


def kind_of(text: str) -> str:
    """The kind of an unquoted text: null, bool, int, float or str."""
    return next((kind for kind, rule in CORE.items() if rule.fullmatch(text)), "str")


def is_null(value: Tree) -> bool:
    """Whether nothing was written there, or a null."""
    return isinstance(value, Scalar) and value.kind == "null"


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!", 1)


def parse_tree(text: str, findings: Findings) -> dict[str, Tree]:
    """The tree of a whole file; `findings` gets its places and problems. Raises UnreadableError."""
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad:
        before = text[: bad.start()].split("\n")
        mend = "save the file as plain UTF-8 text"
        raise UnreadableError(
            f"the character {bad.group()!r} is not allowed", mend, Place(len(before), len(before[-1]) + 1)
        )
    node = _compose(text)
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        raise UnreadableError("the file is empty", "start with trainer: sft and a list of factors")
    if not isinstance(node, yaml.MappingNode):
        what, mend = "the file is not a mapping of keys to values", "write lines such as trainer: sft"
        raise UnreadableError(what, mend, Place.of(node))
    return _Walker(findings).mapping(node, ())


def _compose(text: str) -> yaml.Node | None:
    try:
        return _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else None
        problem = " ".join(filter(None, (error.context, error.problem)))
        mends = (mend for part, mend in SYNTAX_MENDS.items() if part in problem)
        mend = next(mends, "look at the indentation, colons and quotes here")
        raise UnreadableError(f"not YAML: {problem}", mend, place) from None
    except RecursionError:
        raise UnreadableError("nested too deeply", "a matrix needs three levels of nesting") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets "\UFFFFFFFF" through to chr()
        raise UnreadableError(f"not YAML: {error}", "look at the escapes in quoted text") from None


class _Walker:
    """Turns nodes into a tree; writes down every place and what YAML readers disagree about."""

    def __init__(self, findings: Findings) -> None:
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
                self._findings.add(here, what, "keep one of them", at=Place.of(key))
                continue
            self._findings.keys[here] = Place.of(key)
            tree[key.value] = self._value(value, here)
        return tree

    def _usable(self, key: yaml.Node, path: TreePath) -> bool:
        here, place = (*path, "?"), Place.of(key)
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
        own = Place.of(node)
        if self._count > MOST_NODES:
            what = f"more than {MOST_NODES:,} values"
            raise UnreadableError(what, "shorten the file; aliases (*name) count each time", own)
        if len(path) > DEEPEST:
            raise UnreadableError("nested too deeply", "a matrix needs three levels of nesting", own)
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
