"""From what a traced attempt left to the origin that a report shows. Pure.

An origin is told only if the traced attempt failed where the one that it repeats had failed: else the trace
has seen another failure, or none, and that is what is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanbisect import ranks
from nanbisect.evidence import Evidence, Line
from nanbisect.outcome import Note, Outcome, Site, Status

Origin = Mapping[str, Any]
DISAGREE = "trace_disagrees"
NO_ORIGIN = "no_origin"
FROM_START, REPLAY = "from the start", "replay"
BAD = ("nan", "+inf", "-inf")


@dataclass(frozen=True)
class Traced:
    """What came of a trace: an origin, or a note that says why there is none. `outcome` is the traced attempt's own."""

    outcome: Outcome
    origin: Origin | None = None
    note: Note | None = None

    @property
    def same_place(self) -> bool:
        """Whether it failed where the attempt that it repeats had failed."""
        return self.note is None or self.note.code != DISAGREE


def first_try(evidence: Evidence) -> Line | None:
    """The event that counts, with its step as the probe counts: what NANBISECT_TRACE is to be told."""
    return ranks.first_event(evidence.events("nonfinite"))


def origin_of(evidence: Evidence, outcome: Outcome, before: Outcome, *, way: str) -> Traced:
    """What a traced attempt found of the failure of `before`."""
    site = before.site
    assert site is not None
    refused = next((line for line in evidence.events("replay") if line["refused"]), None)
    if refused is not None:
        return Traced(outcome, note=Note(DISAGREE, f"the capsule can't be played back: {refused['refused']}"))
    other = next((line for line in evidence.events("replay") if line["differs"] is not None), None)
    if other is not None and not _same(outcome, site, way):
        text = "the replay of the step had other inputs than the step itself, and did not fail at the same place"
        return Traced(outcome, note=Note(DISAGREE, text))
    if not _same(outcome, site, way):
        return Traced(outcome, note=Note(DISAGREE, _otherwise(outcome, way)))
    line = _origin_line(evidence, site)
    if line is None or not line["found"]:
        why = "the traced attempt told nothing" if line is None else str(line["reason"])
        return Traced(outcome, note=Note(NO_ORIGIN, f"the step was traced, and no origin found: {why}"))
    return Traced(outcome, origin=_origin(line, site, way))


def _same(outcome: Outcome, site: Site, way: str) -> bool:
    found = outcome.site
    if found is None:
        return False
    return (replace(found, step=site.step, since=site.since) if way == REPLAY else found).same_place(site)


def _otherwise(outcome: Outcome, way: str) -> str:
    what = "the replay of the step" if way == REPLAY else "the traced attempt, with the same seed,"
    if outcome.status is Status.NONFINITE:
        return f"{what} failed at another place ({outcome.reason}): attempts disagree, and no origin is told"
    if outcome.status is Status.FINITE:
        return f"{what} did not fail: attempts disagree, and no origin is told"
    return f"{what} was not judged ({outcome.reason}), so no origin is told"


def _origin_line(evidence: Evidence, site: Site) -> Line | None:
    """That of the rank on which it began, if that rank traced; else of another that found something."""
    lines = evidence.events("origin")
    mine = [line for line in lines if ranks.rank_of(line) == site.rank and line["found"]]
    found = [line for line in lines if line["found"]]
    return next(iter((*mine, *found, *lines)), None)


def _origin(line: Line, site: Site, way: str) -> Origin:
    """The fields that DESIGN names, then all else that the trace says."""
    born: Mapping[str, Any] = line["origin"]
    own = {name: born.get(name) for name in ("phase", "kind", "module", "operation", "source")}
    rest = {name: value for name, value in born.items() if name not in own and name != "channel"}
    apart = ("kind", "n", "time", "origin", "found", "reason", "pid", "step", "seconds", "plain_seconds", "operations")
    whole = {name: value for name, value in line.items() if name not in apart}
    cost = {name: line[name] for name in ("seconds", "plain_seconds", "operations")}
    return {
        **own, "channel": None, "chain": line["chain"], "step": site.step, "way": way, **rest,
        "element_channel": born.get("channel"), **whole, "cost": cost, "channels": None, "memory": None,
    }  # fmt: skip


def channels_alone(evidence: Evidence) -> Mapping[str, str | None] | None:
    """Channel -> the kind that its loss alone brought, or None where all was finite; None if that was not tried."""
    lines = evidence.lines("channels_alone")
    return dict(lines[0]["channels"]) if lines else None


def with_channels(origin: Origin, channels: Mapping[str, str | None] | None) -> Origin:
    """The origin with what each channel's loss brought by itself; `channel` if it is one only."""
    if not channels or len(channels) < 2:
        return origin
    bad = [name for name, kind in channels.items() if kind is not None]
    return {**origin, "channels": dict(channels), "channel": bad[0] if len(bad) == 1 else None}


UNWRITTEN = (
    "an unwritten buffer is read: with fresh memory filled with NaN it failed, with deterministic kernels alone it did "
    "not"
)
UNSTABLE = (
    "a kernel is non-deterministic, as far as two attempts tell: with deterministic kernels it did not fail, whether "
    "fresh memory was filled with NaN or not"
)
NEITHER = (
    "neither an unwritten buffer nor a non-deterministic kernel explains that it comes and goes: with deterministic "
    "kernels it failed all the same"
)


def memory_words(filled: Outcome, kernels: Outcome) -> str:
    """What two attempts say of a NaN that comes and goes: with deterministic fill, and with kernels alone."""
    unjudged = next((one for one in (filled, kernels) if not one.judged), None)
    if unjudged is not None:
        return f"whether memory that was never written is read could not be told: {unjudged.reason}"
    if kernels.status is Status.NONFINITE:
        return NEITHER
    return UNWRITTEN if filled.status is Status.NONFINITE else UNSTABLE


def comes_and_goes(attempts: tuple[Outcome, ...]) -> bool:
    """Whether attempts with one seed ended both ways."""
    by_seed: dict[int, set[Status]] = {}
    for attempt in attempts:
        if attempt.judged:
            by_seed.setdefault(attempt.seed, set()).add(attempt.status)
    return any(len(found) > 1 for found in by_seed.values())
