"""Whether what the trace says is true, and all of it in a few words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.cases.bank import Case, Truth
from tests.cases.runner import Traced

Link = Mapping[str, Any]


def _rows(event: Link) -> Any:
    """Without the counts of elements."""
    return [{key: row[key] for key in ("sample", "positions")} for row in event["origin"]["rows"] or ()]


def _addends(event: Link) -> Any:
    """The places of the bad ones."""
    return [place for place, addend in enumerate(event["addends"]) if addend["bad"]]


DETAILS: Mapping[str, Callable[[Link], Any]] = {"rows": _rows, "addends": _addends}


def wrong(case: Case, traced: Traced) -> tuple[str, ...]:
    """Everything that is not as it is; empty where the trace is right."""
    errors = tuple(f"the probe failed: {error}" for error in traced.errors)
    if case.truth is None:
        said = [] if not traced.found else [f"an origin in a healthy training: {words(traced)}"]
        return (*errors, *([] if traced.event is None else ["it surfaced in a healthy training"]), *said)
    if traced.event is None:
        return (*errors, "nothing surfaced")
    if traced.origin is None or not traced.found:
        return (*errors, f"no origin: {traced.origin and traced.origin['reason']}")
    return (*errors, *_differences(case, case.truth, traced.origin))


def _differences(case: Case, truth: Truth, event: Link) -> Iterator[str]:
    origin = event["origin"]
    for name, right in (("phase", (truth.phase,)), ("kind", truth.kinds), ("operation", truth.operations)):
        if origin[name] not in right:
            yield f"{name} is {origin[name]}, not {' or '.join(right)}"
    if origin["module"] != truth.module:
        yield f"module is {origin['module']!r}, not {truth.module!r}"
    if not _at(origin, case, truth.line):
        yield f"line is {origin['source']}, not {truth.line}"
    for name, value in truth.details.items():
        found = DETAILS[name](event) if name in DETAILS else origin[name]
        if found != value:
            yield f"{name} is {found!r}, not {value!r}"
    if truth.use is not None and (event["use"] or {}).get("use") != truth.use:
        yield f"use is {event['use']}, not {truth.use}"
    yield from _later(case, truth, event)


def _later(case: Case, truth: Truth, event: Link) -> Iterator[str]:
    """Where the Inf becomes NaN."""
    at, becomes = event["nan_at"], truth.becomes
    if becomes is None:
        return
    if at is None:
        yield "no NaN comes of the Inf"
        return
    link = event["chain"][at]
    if link["operation"] not in becomes.operations or link["module"] != becomes.module:
        yield f"the NaN is in {_place(link)}, not in {' or '.join(becomes.operations)} of {becomes.module!r}"
    if becomes.line is not None and not _at(link, case, becomes.line):
        yield f"the NaN is at {link['source']}, not at line {becomes.line}"


def _at(link: Link, case: Case, line: int) -> bool:
    """Whether a link names this line of the script."""
    file, _, number = str(link["source"]).rpartition(":")
    return file.endswith(case.script.name) and number == str(line)


def words(traced: Traced) -> str:
    """`+inf of aten.mm in forward, 1.wo, fp16_overflow.py:29; NaN in aten.mul, 2.norm`."""
    event = traced.origin
    if event is None or not event["found"]:
        return "no origin"
    origin, at = event["origin"], event["nan_at"]
    named = origin["phase"] in ("load", "data") and origin["name"] is not None
    name = f" (`{origin['name']}`)" if named else ""
    text = f"{origin['kind']} in {origin['phase']}{name}: {_place(origin)}"
    return text if not at or origin["kind"] == "nan" else f"{text}; NaN in {_place(event['chain'][at])}"


def _place(link: Link) -> str:
    parts = (str(link["operation"]).removeprefix("aten."), link["module"], str(link["source"]).rpartition("/")[2])
    return ", ".join(str(part) for part in parts if part)
