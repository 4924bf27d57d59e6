"""What the ranks of one training saw, put together: where it began, and who only got it from others. Pure.

A NaN on one rank is on all of them after the reduction of gradients, in the same step. Each rank tells
its own first event; clocks of ranks are not compared, since events are read once a step: of the earliest
step, what a rank saw before the reduction stands before what came through it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanbisect.outcome import Ranks, Site

Line = Mapping[str, Any]

OWN = ("load", "data", "forward", "loss", "backward", "recompute")
"""Phases in which a rank works by itself: what is non-finite there began there."""
REDUCED = "reduce"
SHOWN = 8


def of_process(lines: Sequence[Line]) -> list[Line]:
    """The lines of one process, each with its `rank` (as it was at the first backward, when groups are formed) and
    its `pid`."""
    told = [
        line["rank"]
        for kind in ("self_check", "awake")
        for line in lines
        if line.get("kind") == kind and "rank" in line
    ]
    own = {"rank": told[0] if told else 0, "pid": next((line["pid"] for line in lines if "pid" in line), 0)}
    return [{**own, **line} for line in lines]


def rank_of(line: Line) -> int:
    """The rank that wrote a line."""
    return int(line.get("rank", 0))


def process_of(line: Line) -> tuple[int, int]:
    """The process that wrote a line: machines may have the same numbers."""
    return rank_of(line), int(line.get("pid", 0))


def world(lines: Iterable[Line]) -> int:
    """How many processes train: as many as their group has, or as were seen."""
    checks = [line for line in lines if line.get("kind") == "self_check"]
    return max([len({rank_of(line) for line in checks}), *(int(line.get("world", 1)) for line in checks)], default=1)


def first_event(events: Iterable[Line]) -> Line | None:
    """The event that counts, of all ranks."""
    firsts = _first_of_each(events)
    return min(firsts, key=_order, default=None)


def spread(event: Line, events: Iterable[Line], of: int) -> Ranks | None:
    """Which ranks had it by themselves in the step of this event, and which by reduction; None for one process."""
    if of < 2:
        return None
    same = [line for line in _first_of_each(events) if line["step"] == event["step"]]
    own = [rank_of(line) for line in same if line["phase"] != REDUCED and _stage(line) == _stage(event)]
    reduced = [rank_of(line) for line in same if line["phase"] == REDUCED]
    return Ranks(of, tuple(sorted(own)), tuple(sorted(reduced)))


def _first_of_each(events: Iterable[Line]) -> list[Line]:
    """Each rank's first event; its own clock and order are one."""
    by_rank: defaultdict[int, list[Line]] = defaultdict(list)
    for line in events:
        by_rank[rank_of(line)].append(line)
    return [
        min(lines, key=lambda line: (line["step"], line["phase"] == REDUCED, line["time"]))
        for lines in by_rank.values()
    ]


def _order(line: Line) -> tuple[int, int, int, int]:
    return line["step"], _stage(line), line["micro_batch"], rank_of(line)


def _stage(line: Line) -> int:
    """Before the reduction, after it, or by it: what began on one rank explains what came to another."""
    phase = line["phase"]
    return 0 if phase == "load" else 1 if phase in OWN else 3 if phase == REDUCED else 2


def apart(checks: Sequence[Line], batches: Iterable[tuple[Line, list[str]]]) -> str | None:
    """Whether several ranks seem not to share the work: no group, or the same records on all of them in every step."""
    told = sorted({rank_of(line) for line in checks})
    if len(told) < 2:
        return None
    if all(line.get("world") == 1 for line in checks):
        return f"{named(told)} trained each for itself, without a process group"
    places: defaultdict[tuple[int, int], dict[int, list[str]]] = defaultdict(dict)
    for line, ids in batches:
        places[(line["step"], line["micro_batch"])][rank_of(line)] = ids
    shared = [list(by_rank.values()) for by_rank in places.values() if len(by_rank) == len(told)]
    if shared and all(ids == seen[0] for seen in shared for ids in seen):
        return f"{named(told)} met the same records in every step: that is tensor parallelism, or they share no work"
    return None


def mean(values: Mapping[int, float]) -> float:
    """The mean over ranks; of equal values exactly that value, and non-finite if one is."""
    distinct = set(values.values())
    return distinct.pop() if len(distinct) == 1 else math.fsum(values.values()) / len(values)


# words -----------------------------------------------------------------------------------------


def on_ranks(site: Site, *, brief: bool = False) -> str:
    """`on rank 1 of 2 (rank 0 got it by the reduction of gradients)`, `brief` the place only; empty for one process."""
    ranks = site.ranks
    if ranks is None:
        return ""
    if not ranks.by_itself:
        return _in_the_reduction(ranks, brief)
    if len(ranks.by_itself) == ranks.of:
        return f"on {_all(ranks.of)}{'' if brief else ', each by itself'}"
    where = f"on {named(ranks.by_itself)} of {ranks.of}"
    return f"{where} ({_got_it(ranks)} by the reduction of gradients)" if ranks.by_reduction and not brief else where


def _in_the_reduction(ranks: Ranks, brief: bool) -> str:
    if len(ranks.by_reduction) == ranks.of:
        why = ": what each one put in was finite, so it arose in the reduction itself"
        return f"on {_all(ranks.of)}{'' if brief else why}"
    where = f"on {named(ranks.by_reduction)} of {ranks.of}"
    return where if brief else f"{where}, which got it from another rank; that one left no event"


def _got_it(ranks: Ranks) -> str:
    """Those that got it, by number; of many only how many, where that is all the others."""
    got, rest = ranks.by_reduction, ranks.of - len(ranks.by_itself)
    who = f"the other {rest}" if len(got) == rest > 3 else named(got)
    return f"{who} got it"


def _all(of: int) -> str:
    return "both ranks" if of == 2 else f"all {of} ranks"


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 3 and 5`."""
    words = [str(rank) for rank in ranks[:SHOWN]]
    if len(ranks) > SHOWN:
        return f"ranks {', '.join(words)} and {len(ranks) - SHOWN} more"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else f"rank {words[0]}"
