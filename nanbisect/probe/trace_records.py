"""What is kept of operations: all of them in short (Frame), the bad ones in full (Record)."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from .trace_operations import About, Named
from .trace_places import Line, Place
from .window import Ends

FRAMES = 6  # of the user's, a record

ORIGIN, FROM_INF, SPREAD = "origin", "NaN from Inf", "bad->bad"
MASKING, INTENDED, UNWRITTEN, REDUCED = "masking", "intended Inf", "unwritten storage", "came by reduction"
INF = ("+inf", "-inf")


class Frame(NamedTuple):
    """One operation's outputs in short. `parents`: frames of the operations that made its inputs."""

    operation: str
    place: Place
    shape: Tuple[int, ...]
    ends: Ends
    parents: Tuple[int, ...]
    nth: int  # number of the operation

    @property
    def absmax(self) -> float:
        """Of the outputs."""
        return max(abs(self.ends[0]), abs(self.ends[1]))


class Taken(NamedTuple):
    """A bad input: kind, the record that made it, or else how it came: unwritten, reduced, parameter, buffer, batch,
    unknown; its name where it has one, and for unwritten memory the place that made it."""

    kind: str
    record: Optional[int]
    how: Optional[str] = None
    name: Optional[str] = None
    maker: Optional[Tuple[str, Place]] = None


class Known(NamedTuple):
    """A tensor that was there before: parameter, buffer or batch, and its name."""

    what: str
    name: str


class Record:
    """An operation that gave out a bad value, or took one in. `root`: the record where its badness begins.

    `intended`: all there is, is an Inf that was put there; `meant`: so is what it took in.
    """

    def __init__(self, number: int, call: Call, kind: str, taken: List[Taken]) -> None:
        self.number = number
        self.count, self.frame = call.count, -1
        self.operation, self.place, self.micro = call.about.name, call.place, call.micro
        self.kind = kind
        self.taken = taken
        self.label = ""
        self.chosen: Optional[Taken] = None
        self.root = number
        self.twin: Optional[int] = None  # of a birth in recompute: the same in forward
        self.intended = False
        self.meant = False
        self.shapes: Tuple[Tuple[int, ...], ...] = ()
        self.written: Optional[str] = None  # name of a parameter or buffer that it wrote
        self.inputs: List[Dict[str, Any]] = []
        self.outputs: List[Dict[str, Any]] = []
        self.rows: Any = None
        self.spot: Dict[str, Optional[int]] = {"sample": None, "position": None, "channel": None}
        self.lines: List[Line] = []

    @property
    def birth(self) -> bool:
        """Whether badness may begin here: these are described in full."""
        return self.label in (ORIGIN, FROM_INF, UNWRITTEN, REDUCED) or (self.chosen or Taken("", 0)).record is None


class Call:
    """One operation under way."""

    __slots__ = (
        "about",
        "before",
        "count",
        "described",
        "forced",
        "inputs",
        "lines",
        "micro",
        "outputs",
        "place",
        "whole",
    )

    def __init__(self, about: About, place: Place, count: int, micro: int) -> None:
        self.about, self.place, self.count, self.micro = about, place, count, micro
        self.inputs: Named = []
        self.whole: Named = []  # inputs that hold whole numbers
        self.outputs: Named = []
        self.before: List[Tuple[str, torch.Tensor, Any]] = []  # name, written tensor, its range before
        self.described: Dict[int, Dict[str, Any]] = {}  # of these, what can't be seen afterwards
        self.forced = False  # an infinite number was handed over
        self.lines: List[Line] = []
