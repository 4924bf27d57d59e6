"""What a trace found, in words and tables: where a value was born, how it went on, what the numbers were.

Built from `Outcome.origin`, with what the catalogue of known causes says of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanbisect.causes import Finding, known, url
from nanbisect.neutrality import listed
from nanbisect.outcome import CellResult, Outcome, number, unwrapped
from nanbisect.report.words import clip, code, counted, figure, one_line

KINDS = {"nan": "NaN", "+inf": "Inf", "-inf": "-Inf"}
CHAIN, TENSORS, BEFORE, KERNELS, NAMED = 24, 12, 20, 12, 8
TEXT = 120
ITSELF = "the model itself"
LISTED = 32  # positions that the trace lists of one sample
RANGES = ("tensor", "shape", "dtype", "min", "max", "NaN", "+Inf", "-Inf")
LINKS = ("operation", "phase", "module", "line", "gave", "")
FRAMES = ("before it, the nearest first", "phase", "module", "line", "shape", "min", "max")
SDPA = ("kernel", "phase", "module", "calls", "queries x keys", "modulo 64, 128", "fully masked rows")

Table = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Origin:
    """One traced cell. `head` is the sentence for below the verdict, `notes` all further sentences; each table has
    rows for the columns of the same name above it in this module."""

    cell: int
    head: str
    notes: tuple[str, ...]
    chain: Table
    ranges: Table
    kernels: Table
    before: Table
    findings: tuple[Finding, ...] = ()


def origins(failing: Sequence[CellResult]) -> tuple[Origin, ...]:
    """Of every cell that was traced, by number."""
    outcomes = ((result, result.outcome) for result in failing)
    return tuple(_origin(result, one, one.origin) for result, one in outcomes if one is not None and one.origin)


def _origin(result: CellResult, outcome: Outcome, found: Mapping[str, Any]) -> Origin:
    return Origin(
        cell=result.cell.number,
        head=origin_line(found),
        notes=tuple(_notes(found)),
        chain=tuple(_link(link) for link in _some(found, "chain")[:CHAIN]),
        ranges=tuple(_ranges(found))[:TENSORS],
        kernels=tuple(_kernel(row) for row in _some(found, "kernels")[:KERNELS]),
        before=tuple(_frame(row) for row in reversed(_some(found, "before")[-BEFORE:])),
        findings=known(found, outcome),
    )


def _some(found: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    rows = found.get(name)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, (list, tuple)) else []


def _text(value: Any) -> str:
    return clip(one_line(str(value)), TEXT) if value not in (None, "") else ""


def _module(value: Any) -> str:
    """A module's path as the model has it, without DDP around it."""
    path = unwrapped(f"{_text(value)}.").rstrip(".")
    return path or ITSELF


def _in(row: Mapping[str, Any]) -> str:
    """` in decoder.layers.0`; nothing where no module is known."""
    if row.get("module") is None:
        return ""
    path = _module(row["module"])
    return f" in {path if path == ITSELF else code(path)}"


def _source(row: Mapping[str, Any]) -> str:
    return f" ({_text(row['source'])})" if row.get("source") else ""


# the sentence ----------------------------------------------------------------------------------


def origin_line(found: Mapping[str, Any]) -> str:
    """`Born in forward: aten._softmax in decoder.layers.0 (tts.py:118), NaN from Inf; ... ; surfaced in ...`."""
    return f"{_born(found)}{_inputs(found)}{_hidden(found)}{_surfaced(found)}."


def _born(found: Mapping[str, Any]) -> str:
    kind = KINDS.get(str(found.get("kind")), "A non-finite value")
    name = f" in {code(unwrapped(_text(found['name'])))}" if found.get("name") else ""
    module = _in(found)
    source = _source(found)
    label = f", {_text(found['label'])}" if found.get("label") not in (None, "origin") else ""
    operation = f": {code(_text(found['operation']))}" if found.get("operation") else ""
    only = f", by the loss of channel {code(_text(found['channel']))} alone" if found.get("channel") is not None else ""
    return f"{kind} born in {_text(found.get('phase') or '?')}{name}{operation}{module}{source}{label}{only}"


def _inputs(found: Mapping[str, Any]) -> str:
    told = [words for tensor in _some(found, "inputs")[:2] if (words := _range_words(tensor))]
    return f"; its {'input' if len(told) == 1 else 'inputs'}: {', '.join(told)}" if told else ""


def _range_words(tensor: Mapping[str, Any]) -> str:
    """`self -1.2 to 2 with 54 of 144 -Inf`."""
    if tensor.get("numel") is None:
        return ""
    name = f"{_text(tensor['name'])} " if tensor.get("name") else ""
    low, high = (_figure(tensor.get(end)) for end in ("min", "max"))
    span = f"{low} to {high}" if low and high else "nothing finite"
    keys = (("nan", "NaN"), ("posinf", "+Inf"), ("neginf", "-Inf"))
    bad = [f"{tensor[key]} {word}" for key, word in keys if tensor.get(key)]
    counts = f" with {listed(bad)} of {tensor['numel']}" if bad else ""
    return f"{name}{span}{counts}"


def _hidden(found: Mapping[str, Any]) -> str:
    by = _some(found, "hidden_by")
    return f"; hidden by {code(_text(by[0].get('operation')))}{_source(by[0])}" if by else ""


def _surfaced(found: Mapping[str, Any]) -> str:
    place = found.get("surfaced")
    if not isinstance(place, Mapping):
        return ""
    name = f" in {code(unwrapped(_text(place['name'])))}" if place.get("name") else ""
    return f"; surfaced in {_text(place.get('phase'))}{name}"


def plain_lines(found: Mapping[str, Any], outcome: Outcome) -> tuple[str, ...]:
    """All of it for a terminal: the sentence, what is known, the notes, the chain, the ranges."""
    chain = [_link(link) for link in _some(found, "chain")[:CHAIN]]
    told = [sentence for finding in known(found, outcome) for sentence in known_words(finding)]
    sentences = [text.replace("`", "") for text in (origin_line(found), *told, *_notes(found))]
    tables = (("chain", LINKS, chain), ("numbers", RANGES, list(_ranges(found))[:TENSORS]))
    return (
        *sentences,
        *(line for title, head, rows in tables if rows for line in (f"{title}:", *_aligned(head, rows))),
    )


def _aligned(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    lines = [head, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    for line in lines:
        yield "  " + "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip()


# further sentences -----------------------------------------------------------------------------


def _notes(found: Mapping[str, Any]) -> Iterator[str]:
    yield from _elements(found)
    yield from _also(found)
    yield from _first_nan(found)
    yield from _channels(found)
    use = found.get("use")
    if isinstance(use, Mapping):
        yield f"Of the tied weight it came through the {_text(use.get('use'))}{_in(use)}."
    if found.get("forward_was_finite"):
        yield "The same operation was finite in forward: only its recomputation was not."
    for jump in [jump for jump in _some(found, "jumps") if jump.get("source")][:NAMED]:
        grown = f"from {_figure(jump.get('from'))} to {_figure(jump.get('to'))}"
        yield f"Before it, absmax grew {grown} in {code(_text(jump.get('operation')))}{_source(jump)}."
    allocated = found.get("allocated")
    if isinstance(allocated, Mapping):
        made = f"{code(_text(allocated.get('operation')))}{_source(allocated)}"
        yield f"It was read from memory that nothing had written, made by {made}."
    yield from _loaded(found)
    if found.get("memory"):
        yield f"It comes and goes: {one_line(str(found['memory']))}."
    if found.get("traced_in_eager"):
        yield "The training is compiled; this step was traced in eager."
    yield _cost(found)


def _elements(found: Mapping[str, Any]) -> Iterator[str]:
    rows = _some(found, "rows")
    told = [f"sample {row.get('sample')} at {_positions(row.get('positions'))}" for row in rows[:NAMED]]
    if told:
        more = f", and {len(rows) - NAMED} samples more" if len(rows) > NAMED else ""
        yield f"Its bad elements are those of {listed(told)}{more} (counted from 0)."


def _positions(positions: Any) -> str:
    """`positions 0 to 4`, `position 3`, `positions 0, 2, 5`."""
    numbers = [int(each) for each in positions] if isinstance(positions, (list, tuple)) else []
    if not numbers:
        return "positions that are not known"
    if len(numbers) == 1:
        return f"position {numbers[0]}"
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    more = " and further ones" if len(numbers) == LISTED else ""
    return (
        f"positions {numbers[0]} to {numbers[-1]}{more}"
        if whole
        else f"positions {', '.join(map(str, numbers[:NAMED]))}"
    )


def _also(found: Mapping[str, Any]) -> Iterator[str]:
    rows = _some(found, "also")
    if rows:
        names = listed([code(_module(row.get("module"))) for row in rows], NAMED)
        yield f"The same is born at the same line in {names} too."


def _first_nan(found: Mapping[str, Any]) -> Iterator[str]:
    chain, place = _some(found, "chain"), found.get("nan_at")
    if found.get("kind") in ("+inf", "-inf") and isinstance(place, int) and 0 <= place < len(chain):
        link = chain[place]
        module = _in(link)
        where = f"{code(_text(link.get('operation')))}{module}{_source(link)}"
        yield f"The Inf becomes NaN in {_text(link.get('phase'))}: {where}."


def _channels(found: Mapping[str, Any]) -> Iterator[str]:
    channels = found.get("channels")
    if not isinstance(channels, Mapping) or not channels:
        return
    bad = [str(name) for name, kind in channels.items() if kind is not None]
    if not bad:
        yield f"No channel's loss brings it by itself ({counted(len(channels), 'channel')} tried one by one)."
    elif len(bad) == len(channels):
        yield f"The loss of each channel brings it by itself (all {len(channels)} tried one by one)."
    elif len(bad) == 1:
        yield f"Only the loss of channel {code(_text(bad[0]))} brings it (of {len(channels)}, tried one by one)."
    else:
        names = listed([code(_text(name)) for name in bad], NAMED)
        yield f"The losses of {len(bad)} of {len(channels)} channels bring it, each by itself: {names}."


def _loaded(found: Mapping[str, Any]) -> Iterator[str]:
    for row in _some(found, "loaded")[:NAMED]:
        use = row.get("first_use")
        first = f", first used in {code(_text(use.get('operation')))}" if isinstance(use, Mapping) else ""
        value = _text(row.get("value"))
        yield f"Before the step the {_text(row.get('what'))} {code(_text(row.get('name')))} was already {value}{first}."


def _cost(found: Mapping[str, Any]) -> str:
    cost = found.get("cost")
    way = "replayed from its capsule" if found.get("way") == "replay" else "with the same seed from the start"
    step = f"Step {found.get('step')} was traced, {way}"
    if not isinstance(cost, Mapping) or cost.get("seconds") is None:
        return f"{step}."
    plain = number(cost["plain_seconds"]) if cost.get("plain_seconds") else 0.0
    times = f", {number(cost['seconds']) / plain:.1f} times a plain one" if plain > 0 else ""
    return f"{step}: {cost.get('operations')} operations in {number(cost['seconds']):.2f} s{times}."


# tables ----------------------------------------------------------------------------------------


def _figure(value: Any) -> str:
    try:
        return "" if value is None else figure(number(value))
    except (TypeError, ValueError, KeyError):
        return _text(value)


def _shape(value: Any) -> str:
    return " x ".join(str(each) for each in value) if isinstance(value, (list, tuple)) else ""


def _place(row: Mapping[str, Any]) -> tuple[str, ...]:
    module = "" if row.get("module") is None else _module(row["module"])
    return _text(row.get("operation")), _text(row.get("phase")), module, _text(row.get("source"))


def _link(row: Mapping[str, Any]) -> tuple[str, ...]:
    label = "" if row.get("label") == "bad->bad" else _text(row.get("label"))
    return (*_place(row), KINDS.get(str(row.get("kind")), _text(row.get("kind"))), label)


def _frame(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (*_place(row), _shape(row.get("shape")), _figure(row.get("min")), _figure(row.get("max")))


def _ranges(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for what in ("inputs", "outputs"):
        for place, tensor in enumerate(_some(found, what)):
            before = " (before)" if tensor.get("before") else ""
            name = f"{what[:-1]} {_text(tensor.get('name')) or place}{before}"
            ends = (_figure(tensor.get("min")), _figure(tensor.get("max")))
            counts = (_text(tensor.get(key, "")) for key in ("nan", "posinf", "neginf"))
            yield (name, _shape(tensor.get("shape")), _text(tensor.get("dtype")), *ends, *counts)


def _kernel(row: Mapping[str, Any]) -> tuple[str, ...]:
    module = "" if row.get("module") is None else _module(row["module"])
    lengths = f"{_text(row.get('queries'))} x {_text(row.get('keys'))}"
    modulo = row.get("modulo")
    left = " and ".join(str(each)[1:-1] for each in modulo) if isinstance(modulo, (list, tuple)) else ""
    rows = "unknown" if row.get("masked_rows") is None else str(row["masked_rows"])
    return _text(row.get("kernel")), _text(row.get("phase")), module, _text(row.get("calls")), lengths, left, rows


def known_words(found: Finding) -> Iterator[str]:
    """The sentence with its evidence, then the mend with where it is told."""
    yield f"{found.sentence} Evidence: {found.evidence.rstrip('.')}."
    references = f" See {listed([url(each) for each in found.references], NAMED)}." if found.references else ""
    yield f"To mend: {found.mend.rstrip('.')}.{references}"
