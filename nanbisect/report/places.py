"""Where it surfaced, in words; what a check after clipping would have said instead; what a trace found."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanbisect.neutrality import listed
from nanbisect.outcome import CellResult, Site, Smear
from nanbisect.ranks import on_ranks
from nanbisect.report.words import code, counted, figures, kind_of, one_line
from nanbisect.sightings import OF_A_MICRO_BATCH

OF_STEP = {
    "data": "the data",
    "forward": "forward",
    "loss": "the loss",
    "backward": "backward",
    "recompute": "the recomputation in backward",
    "reduce": "the reduction of gradients",
    "clip": "clipping",
    "optimizer": "the optimizer",
}
GRADIENTS = ("backward", "reduce", "clip")
AFTER_LOSS = (*GRADIENTS, "recompute", "optimizer")
SHOWN = 5


@dataclass(frozen=True)
class Place:
    """Failing cells that surfaced at the same place. `parameters` in order of arrival, of the first cell.

    `records` are those of the micro-batch that failed in the first cell (`of_what`: of that, or of the whole step),
    `origin` what a trace found there.
    """

    text: str
    kind: str
    cells: tuple[int, ...]
    parameters: tuple[str, ...]
    records: tuple[str, ...]
    of_what: str
    origin: str | None


def places(failing: Sequence[CellResult]) -> tuple[Place, ...]:
    """Every place at which failing cells surfaced, the commonest first."""
    return tuple(_place(group) for group in _groups(failing))


def surfaces(failing: Sequence[CellResult]) -> str:
    """`It surfaces in backward of step 1, first in the gradient of ..., while the loss is finite (3.789).`"""
    groups = _groups(failing)
    if not groups:
        return "Where it surfaced was not recorded."
    group = groups[0]
    whole = len(group) == len(failing)
    who = "It surfaces" if whole else f"In {len(group)} of {len(failing)} failing cells it surfaces"
    text = f"{who} {_where(group)}."
    origin = next((found for result in group if (found := _origin_of(result))), None)
    return f"{text} {origin}" if origin else text


def place_of(result: CellResult) -> str:
    """`NaN in backward of step 1, first in the gradient of ...` of one failing cell."""
    site = _site(result)
    return f"{kind_of(result)} {_position(site, [result], brief=True)}" if site else "at a place that was not recorded"


def loaded_bad(failing: Sequence[CellResult]) -> str:
    """What the probe saw right after loading, as part of a sentence."""
    bad = [result for result in failing if (site := _site(result)) and site.phase == "load"]
    if not bad:
        return "right after load the probe saw no non-finite weight or buffer"
    site = _site(bad[0])
    first = f", first {one_line(site.parameters[0])}" if site and site.parameters else ""
    return f"right after load weights or buffers were already non-finite in {len(bad)} of {len(failing)} cells{first}"


def smears(failing: Sequence[CellResult]) -> str | None:
    """What a check after clipping would have blamed, and in how many failing cells it would mislead."""
    known = [smear for result in failing if (smear := _smear(result))]
    misled = [smear for smear in known if smear.misleads]
    if not known:
        return None
    first = [*misled, *known][0]
    said = f"A check after clipping would have blamed {one_line(first.blamed)} ({first.bad} of {first.numel} elements)"
    if not misled:
        return f"{said} too: that is where the first non-finite gradient arrived."
    return (
        f"{said}; the first gradient to arrive non-finite was {one_line(first.first)}. "
        f"Such a check would mislead in {len(misled)} of {counted(len(failing), 'failing cell')}."
    )


def origin_words(origin: Mapping[str, Any]) -> str:
    """`A trace finds its origin in forward: aten._softmax in decoder.layers.0.attention (tts.py:41).`"""
    phase = f" in {one_line(str(origin['phase']))}" if origin.get("phase") else ""
    operation = f": {code(str(origin['operation']))}" if origin.get("operation") else ""
    module = f" in {code(str(origin['module']))}" if origin.get("module") else ""
    source = f" ({one_line(str(origin['source']))})" if origin.get("source") else ""
    channel = f", channel {one_line(str(origin['channel']))}" if origin.get("channel") is not None else ""
    return f"A trace finds its origin{phase}{operation}{module}{source}{channel}."


def _groups(failing: Sequence[CellResult]) -> list[list[CellResult]]:
    groups: defaultdict[tuple[object, ...], list[CellResult]] = defaultdict(list)
    for result in failing:
        site = _site(result)
        if site is not None:
            groups[(site.step, site.phase, site.parameters[:1])].append(result)
    return sorted(groups.values(), key=len, reverse=True)


def _place(group: Sequence[CellResult]) -> Place:
    first, site = group[0], _site(group[0])
    origins = (found for result in group if (found := _origin_of(result)))
    return Place(
        text=_where(group),
        kind=kind_of(first) or "",
        cells=tuple(result.cell.number for result in group),
        parameters=site.parameters if site else (),
        records=first.outcome.named_suspects if first.outcome else (),
        of_what=of_what(site) if site else "step",
        origin=next(origins, None),
    )


def of_what(site: Site, batch: str = "micro-batch") -> str:
    """`micro-batch`, `micro-batch on rank 1`, or `step`: what the suspect records are of."""
    if site.phase not in OF_A_MICRO_BATCH:
        return "step"
    return f"{batch} on rank {site.rank}" if site.ranks else batch


def _where(group: Sequence[CellResult]) -> str:
    """`in backward of step 1, first in the gradient of ..., while the loss is finite (3.789)`."""
    site = _site(group[0])
    return f"{_position(site, group)}{_loss(site, group)}" if site else "at a place that was not recorded"


def _position(site: Site, group: Sequence[CellResult], *, brief: bool = False) -> str:
    who = _ranks(group, brief)
    if site.phase == "load":
        return f"right after load, before the first step{_first(site)}{who}"
    exact = site.micro_batch and site.phase in OF_A_MICRO_BATCH and len(group) == 1
    micro = f" (micro-batch {site.micro_batch}, counted from 0)" if exact else ""
    return f"in {OF_STEP.get(site.phase, one_line(site.phase))} of {site.steps}{micro}{_first(site)}{who}"


def _ranks(group: Sequence[CellResult], brief: bool) -> str:
    """`, on rank 1 of 2 (rank 0 got it by ...)`, where the cells agree on that."""
    words = {on_ranks(site, brief=brief) if (site := _site(result)) else "" for result in group}
    if len(words) > 1:
        return ", on ranks that differ between these cells"
    return "".join(f", {word}" for word in words if word)


def _first(site: Site) -> str:
    """A loss by its channel (what arrives after it is only carried on), all else by its first tensor."""
    if site.phase == "loss" and site.channels:
        many = "channel" if len(site.channels) == 1 else "channels"
        return f", in {many} {listed([one_line(name) for name in site.channels], SHOWN)}"
    if site.parameters and site.phase != "loss":
        gradient = "the gradient of " if site.phase in GRADIENTS else ""
        return f", first in {gradient}{one_line(site.parameters[0])}"
    return ", in the norm handed to it" if site.phase == "clip" else ""


def _loss(site: Site, group: Sequence[CellResult]) -> str:
    """The loss of the failing step in these cells: the NaN that users meet comes with a finite one."""
    if site.phase not in AFTER_LOSS:
        return ""
    losses = [loss for result in group if (loss := _loss_of(result)) is not None]
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not losses or len(losses) < len(group):
        return ""
    if len(finite) == len(losses):
        mean = ", the mean over ranks" if site.ranks else ""
        return f", while the loss is finite ({figures(finite)}{mean})"
    if not finite:
        return ", and the loss is non-finite too"
    return f", while the loss is finite in {len(finite)} of these cells"


def _loss_of(result: CellResult) -> float | None:
    """The loss of the step of the site; of outcomes that do not say it, from the curve."""
    site, losses = _site(result), result.outcome.loss if result.outcome else ()
    if site is None:
        return None
    if site.loss is not None:
        return site.loss
    return losses[site.step - 1] if 0 < site.step <= len(losses) else None


def _site(result: CellResult) -> Site | None:
    return result.outcome.site if result.outcome else None


def _smear(result: CellResult) -> Smear | None:
    return result.outcome.smear if result.outcome else None


def _origin_of(result: CellResult) -> str | None:
    origin = result.outcome.origin if result.outcome else None
    return origin_words(origin) if origin else None
