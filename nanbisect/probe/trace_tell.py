"""The `origin` event in the form that `schema` gives, from the book of a traced step."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import trace_way as way
from .names import Names
from .trace_book import Book
from .trace_loss import Addend, Use
from .trace_mode import Mode
from .trace_places import Line, Place, Places, shown
from .trace_records import INF, INTENDED, MASKING, ORIGIN, REDUCED, Frame, Record
from .trace_way import Way

HEAD, TAIL = 24, 8  # links of a long chain that are written
OUTSIDE = {"parameter": "load", "buffer": "load", "batch": "data", "unknown": "data", "reduced": "reduce"}
BEFORE = ("forward", "loss", "data")  # what comes from nowhere there was made before the step's first forward
Fields = Dict[str, Any]


class Paths:
    """Module -> its path in the longest of the roots that hold it."""

    def __init__(self, names: Names, roots: Sequence[Any], seen: Dict[int, Any]) -> None:
        self.table: Dict[int, str] = {}
        self.seen = seen
        known = [module() for module in names.modules]
        for root in [*known, *roots]:
            for path, part in root.named_modules() if root is not None else ():
                if len(path) >= len(self.table.get(id(part), "")):
                    self.table[id(part)] = path

    def __call__(self, key: Optional[int]) -> Optional[str]:
        if key is None or key in self.table:
            return None if key is None else self.table[key]
        return type(self.seen[key]).__name__ if key in self.seen else None


class Teller:
    """Turns records into LINKs and the like."""

    def __init__(
        self, book: Book, places: Places, path: Callable[[Optional[int]], Optional[str]], leaves: Dict[int, str]
    ) -> None:
        self.book, self.places, self.path, self.leaves = book, places, path, leaves

    def where(self, operation: str, place: Place, count: int) -> Fields:
        """operation, phase, module and source."""
        return {
            "operation": operation, "phase": self.places.phase(place, count),
            "module": self.path(place.owner), "source": shown(place.source),
        }  # fmt: skip

    def link(self, record: Record) -> Fields:
        """LINK of a record. One whose bad input came from outside the step has the phase of that."""
        fields = self.where(record.operation, record.place, record.count)
        label, how = record.label, record.chosen.how if record.chosen is not None else None
        if record.meant and record.intended and how in OUTSIDE:
            label = INTENDED
        elif how == "unknown" and fields["phase"] not in BEFORE:
            pass  # neither the batch nor a parameter: where it came from is not known
        elif label != MASKING and how in OUTSIDE and not record.meant:
            fields["phase"] = OUTSIDE[how]
            maker = record.chosen.maker if record.chosen is not None else None
            fields["operation"] = maker[0] if maker is not None and how == "reduced" else fields["operation"]
            label = REDUCED if how == "reduced" else ORIGIN
        node = record.place.node if fields["phase"] != "recompute" else None
        return {**fields, "kind": record.kind, "label": label, "node": node}

    def frame(self, frame: Frame) -> Fields:
        """A healthy operation."""
        where = self.where(frame.operation, frame.place, frame.nth)
        return {**where, "shape": list(frame.shape), "min": frame.ends[0], "max": frame.ends[1]}

    def jump(self, jump: Tuple[Frame, float, float]) -> Fields:
        """An operation whose output was much larger than its inputs."""
        frame, low, high = jump
        return {**self.where(frame.operation, frame.place, frame.nth), "from": low, "to": high}

    def origin(self, found: Way) -> Fields:
        """ORIGIN."""
        record = found.birth
        taken = record.chosen
        name = taken.name if taken is not None and taken.name is not None else record.written
        if name is None and record.place.leaf is not None:
            name = self.leaves.get(record.place.leaf)
        maker = taken.maker if taken is not None and taken.how == "unwritten" else None
        made = None if maker is None else self.where(maker[0], maker[1], record.count)
        return {
            **self.link(record), "name": name, "frames": [_text(line) for line in record.lines],
            "inputs": record.inputs, "outputs": record.outputs, "rows": record.rows, **record.spot,
            "allocated": made and {key: made[key] for key in ("operation", "module", "source")},
            "forward_was_finite": found.finite_before,
        }  # fmt: skip

    def loaded(self, fields: Fields, used: Any) -> Fields:
        """ORIGIN of what was bad before the step, at its first use (operation, place, number), if it had one."""
        where = {"operation": None, "module": None, "source": None} if used is None else self.where(*used)
        return {
            **where, "phase": "load", "kind": fields["value"], "label": ORIGIN, "node": None, "name": fields["name"],
            "frames": [], "inputs": [], "outputs": [], "rows": None, "sample": None, "position": None,
            "channel": None, "allocated": None, "forward_was_finite": None,
        }  # fmt: skip

    def chain(self, found: Way) -> Fields:
        """chain, chain_length, nan_at, hidden_by, before and jumps."""
        links = [self.link(record) for record in found.links]
        middle = len(links) - TAIL if len(links) > HEAD + TAIL else HEAD
        nan_at = next((place for place, record in enumerate(found.links) if _is_nan(record)), None)
        return {
            "chain": links[:HEAD] + (links[middle:] if len(links) > HEAD else []), "chain_length": len(links),
            "nan_at": nan_at, "hidden_by": [self.link(record) for record in found.hidden],
            "before": [self.frame(frame) for frame in way.before(self.book, found.birth)],
            "jumps": [self.jump(jump) for jump in way.jumps(self.book, found.birth)],
        }  # fmt: skip


def _is_nan(record: Record) -> bool:
    return record.kind not in INF and record.label != MASKING


def _text(line: Line) -> str:
    return "%s %s" % (shown(line), line[2])


LINK = ("operation", "phase", "module", "source", "kind", "label", "node")
NOTHING: Fields = {
    "chain": [],
    "chain_length": 0,
    "nan_at": None,
    "hidden_by": [],
    "before": [],
    "jumps": [],
    "also": [],
    "also_count": 0,
}


def kernels(teller: Teller, mode: Mode) -> List[Fields]:
    """KERNEL each."""
    return [
        {**fields, "module": teller.path(place.owner), "source": shown(place.source)}
        for place, fields in mode.kernels.told()
    ]


class Graph(NamedTuple):
    """What the graph of a micro-batch's loss showed."""

    addends: List[Addend]
    uses: Dict[int, List[Use]]


def addends(teller: Teller, graph: Graph, found: Optional[Way]) -> List[Fields]:
    """Each addend of the loss: whether it was bad, and whether the first bad gradient lies in its graph."""
    bad = {record.count for record in teller.book.records if record.label != MASKING}
    number = None if found is None else _first_node(found)
    lines = []
    for addend in graph.addends:
        made = teller.places.forward_table.get(addend.number)
        where: Fields = {"operation": None, "module": None, "source": None}
        if made is not None:
            where = {"operation": made.operation, "module": teller.path(made.module), "source": shown(made.line)}
        reaches = None if number is None else number in addend.below
        nodes = [teller.places.forward_table.get(each) for each in (addend.number, *addend.scaled)]
        lines.append({**where, "bad": any(node.nth in bad for node in nodes if node is not None), "reaches": reaches})
    return lines


def _first_node(found: Way) -> Optional[int]:
    """Number of the node that made the first bad gradient; None where the walk back began at the loss."""
    for record in found.links:
        if record.place.phase in ("backward", "recompute") and record.label != MASKING:
            return record.place.number if record.place.outer is None else record.place.outer
    return None


def use(teller: Teller, uses: Sequence[Use], told: Sequence[str], found: Optional[Way]) -> Optional[Fields]:
    """Of a tied weight: of the uses that arrived non-finite by themselves (`told`) the first on the way."""
    bad = [each for each in uses if "%s (%s)" % (each.use, each.node) in told] or list(uses)
    numbers = {each.number: each for each in bad}
    on_way = [] if found is None else [record.place for record in found.links]
    chosen = next((numbers[place.number] for place in on_way if place.number in numbers), None)
    chosen = chosen or (bad[0] if told else None)
    if chosen is None:
        return None
    made = teller.places.forward_table.get(chosen.number)
    module, line = (None, None) if made is None else (teller.path(made.module), shown(made.line))
    return {"use": chosen.use, "node": chosen.node, "module": module, "source": line}


def first_use(teller: Teller, used: Any) -> Optional[Fields]:
    """Where a tensor from before was used first."""
    if used is None:
        return None
    operation, place, count = used
    return teller.where(operation, place, count)
