"""What the lines of an attempt show: where a bad value first surfaced, curves, channels, records, times. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

from nanbisect import ranks
from nanbisect.evidence import Evidence, Line
from nanbisect.outcome import CONTENT, Site, Smear, number, unwrapped

SHOWN = 8  # parameters kept in a site
CUT = 256  # ids that the probe lists of one batch
OF_A_MICRO_BATCH = ("loss", "backward", "forward")  # phases whose micro-batch is known; the others are of a whole step


def first_event(evidence: Evidence) -> Line | None:
    """The first event, with the step as the user counts it: tries of one step under a GradScaler are one."""
    first = ranks.first_event(evidence.events("nonfinite"))
    if first is None:
        return None
    return {**first, "try": first["step"], "step": _window_of(evidence, first["step"])}


def _window_of(evidence: Evidence, step: int) -> int:
    """The optimizer step that the probe's step (a try) belongs to; the same where the trainer says nothing."""
    windows = [line["window"] for line in evidence.diary if line.get("step") == step and "window" in line]
    return int(windows[0]) if windows else step


def site_of(evidence: Evidence) -> Site | None:
    """Where the first bad value surfaced; None if none did."""
    event = first_event(evidence)
    if event is None:
        return None
    losses, _ = curves_of(evidence)
    return Site(
        step=event["step"],
        micro_batch=event["micro_batch"],
        rank=event["rank"],
        phase=event["phase"],
        kind=event["value"],
        parameters=tuple(unwrapped(tensor["name"]) for tensor in event["tensors"][:SHOWN]),
        channels=_bad_channels(evidence, event),
        loss=losses.get(event["step"]),
        ranks=ranks.spread({**event, "step": event["try"]}, evidence.events("nonfinite"), ranks.world(evidence.probe)),
        since=event.get("since"),  # numbered as the run's own steps: only a long run, which has no diary, has it
    )


def _bad_channels(evidence: Evidence, event: Line) -> tuple[str, ...]:
    """Channels whose own loss was non-finite in the micro-batch of the event."""
    for line in evidence.lines("step"):
        if line["step"] == event["try"] and event["micro_batch"] < len(line["channels"]):
            sums = line["channels"][event["micro_batch"]]
            return tuple(name for name, (total, _) in sums.items() if isinstance(total, str))
    return ()


def smear_of(evidence: Evidence) -> Smear | None:
    """What a check after clipping would have said in the step of the event."""
    event = first_event(evidence)
    if event is None:
        return None
    place = (event["try"], event["rank"])
    for line in (line for line in evidence.events("step") if (line["step"], ranks.rank_of(line)) == place):
        census = line.get("after_clip")
        if line["bad"] and census and census["first"] is not None:
            return Smear(census["first"], census["bad"], census["numel"], unwrapped(line["bad"][0]["name"]))
    return None


def unbroken(curve: Mapping[int, float]) -> tuple[float, ...]:
    """Its values from step 1 on, up to the first that is not known: a long run writes few of its steps."""
    steps = itertools.takewhile(lambda step: step in curve, itertools.count(1))
    return tuple(curve[step] for step in steps)


def curves_of(evidence: Evidence) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """Loss (mean of the micro-batches) and gradient norm by step; the probe's where the trainer's are missing."""
    losses, norms = ({}, {}) if evidence.lines("step") else _curves_of_ranks(evidence)
    for line in evidence.lines("step"):  # of several tries of a step the last one counts
        values = [number(value) for value in line["losses"]]
        losses[line["window"]] = sum(values) / max(len(values), 1)
        norms[line["window"]] = number(line["grad_norm"])
    return losses, norms


def _curves_of_ranks(evidence: Evidence) -> tuple[dict[int, float], dict[int, float]]:
    """Loss and norm by step, the mean over ranks: each of them has a loss of its own."""
    losses: defaultdict[int, dict[int, float]] = defaultdict(dict)
    norms: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for line in evidence.events("step"):
        step, rank = line["step"], ranks.rank_of(line)
        values = [
            number(entry["handed"] if entry["unscaled"] is None else entry["unscaled"]) for entry in line["losses"]
        ]
        if values:
            losses[step][rank] = sum(values)
        if line["norm"] is not None:
            norms[step][rank] = number(line["norm"])
    return _means(losses), _means(norms)


def _means(by_step: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    return {step: ranks.mean(values) for step, values in by_step.items()}


def steps_by_rank(evidence: Evidence) -> list[Line]:
    """The probe's accounts of steps, those of a step in the order of ranks."""
    return sorted(evidence.events("step"), key=lambda line: (line["step"], ranks.rank_of(line)))


def channels_of(evidence: Evidence) -> dict[str, tuple[float, float]]:
    """Mean loss and number of labels of each channel over the first step."""
    lines = [line for line in evidence.lines("step") if line["taken"]]
    sums: dict[str, tuple[float, float]] = {}
    for micro in lines[0]["channels"] if lines else ():
        for name, (total, count) in micro.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + number(total), before[1] + number(count))
    return {name: (total / count if count else 0.0, count) for name, (total, count) in sums.items()}


def first_gradients_of(evidence: Evidence) -> dict[str, float]:
    """L2 norms of step 1, if the optimizer took it; a GradScaler's scale is taken out again."""
    for line in steps_by_rank(evidence):
        if line["step"] == 1 and line.get("gradient_norms") and line["taken"]:
            scale = number(line["scale"]) if line["scale"] is not None else 1.0
            return {unwrapped(name): number(value) / scale for name, value in line["gradient_norms"].items()}
    return {}


def records_of(evidence: Evidence) -> tuple[str, ...]:
    """Ids in the order in which training first met them."""
    return tuple(dict.fromkeys(identifier for line in trained_of(evidence) for identifier in ids_of(line)))


def trained_of(evidence: Evidence) -> list[Line]:
    """Without what a script looked at and skipped."""
    return [line for line in _served(evidence) if line.get("backward", True)]


def _served(evidence: Evidence) -> list[Line]:
    """What each micro-batch held: the trainer's word, or what the probe saw of a command's data."""
    batches = evidence.events("batch")
    batches.sort(key=lambda line: (line["step"], line["micro_batch"], ranks.rank_of(line)))
    return evidence.lines("micro_batch") or batches


def ids_of(line: Line) -> list[str]:
    """Record ids of a micro-batch; where a batch has none, its rows of the dataset as `row 17`, else their marks."""
    if line.get("records"):
        return [str(identifier) for identifier in line["records"]]
    rows = [f"row {index}" for index in line.get("indices") or ()]
    return rows or [f"{CONTENT}{mark}" for mark in line.get("contents") or ()]


def _place(line: Line) -> tuple[int, int, bool]:
    """Rank and micro-batch of a batch or an event, and whether it was handed to backward."""
    return ranks.rank_of(line), line["micro_batch"], line.get("backward", True)


def suspects_of(evidence: Evidence) -> tuple[str, ...]:
    """Records of the micro-batch in which it surfaced, on its rank; of the whole step, or of several, of all ranks,
    where only that is known; none at load."""
    event = first_event(evidence)
    if event is None or event["phase"] == "load":
        return ()
    before = event["try"] - 1 if event.get("since") is None else event["since"]
    lines = [line for line in _served(evidence) if before < line["step"] <= event["try"]]
    if event["phase"] in OF_A_MICRO_BATCH and evidence.diary:
        lines = lines[event["micro_batch"] : event["micro_batch"] + 1]
    elif event["phase"] in OF_A_MICRO_BATCH:
        lines = [line for line in lines if _place(line) == _place(event)]
    return tuple(dict.fromkeys(identifier for line in lines for identifier in ids_of(line)))


def times_of(evidence: Evidence) -> tuple[float | None, float | None]:
    """Seconds to load (process start included) and to train."""
    loaded = evidence.lines("loaded")
    if not loaded or not evidence.diary:
        return None, None
    train = evidence.diary[-1]["at"] - loaded[0]["at"]
    return max(0.0, evidence.ending.seconds - train), train


def memory_of(evidence: Evidence) -> int | None:
    """Peak bytes: the device's where there is one, else the host's."""
    peaks = [line["memory"]["device"] or line["memory"]["host"] for line in evidence.events("step")]
    return max(peaks) if peaks else None


def ids_by_place(evidence: Evidence) -> Iterator[tuple[Line, list[str]]]:
    """Batches of the probe with their ids, as far as they have any."""
    return ((line, ids) for line in evidence.events("batch") if (ids := ids_of(line)))
