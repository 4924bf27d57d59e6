"""Words that many sentences share.

A sentence of a report is one line of text in which `code()` marks names and levels. Data is cleaned of
line breaks and control characters here, once; each rendering escapes what its own format needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from nanbisect.outcome import CellResult

# C0 and C1 controls, direction overrides and other invisible marks, lone surrogates
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
_PLAIN_LEVEL = re.compile(r"[\w.+:-]+")


def one_line(text: str) -> str:
    """The text on one line, without control characters and invisible marks."""
    return " ".join(_UNPRINTABLE.sub(" ", text).split())


def clip(text: str, most: int) -> str:
    """The text, cut to `most` characters with an ellipsis; at a blank, so that no half of a secret is left."""
    if len(text) <= most:
        return text
    short = text[: most - 1]
    blank = short.rfind(" ", most // 2)
    return f"{(short[:blank] if blank > 0 else short).rstrip()}…"


def code(text: str) -> str:
    """A name or level marked as such; a backtick inside would end the mark."""
    return f"`{one_line(text).replace('`', chr(39))}`"


def counted(count: int, noun: str) -> str:
    """`1 cell`, `3 cells`, `2 passes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def was(count: int) -> str:
    """The verb that goes with a count."""
    return "was" if count == 1 else "were"


def either(words: Sequence[str]) -> str:
    """`2`, `2 or 8`, `2, 4 or 8`."""
    return " or ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def status_words(status: str) -> str:
    """`out of memory` for out_of_memory."""
    return {"nonfinite": "non-finite"}.get(status, status.replace("_", " "))


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def figure(value: float) -> str:
    """Four significant digits; `NaN`, `Inf`, `-Inf`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:.4g}"


def figures(values: Sequence[float]) -> str:
    """`3.789`, or `3.789 to 4.012` where they differ in what is shown."""
    low, high = figure(min(values)), figure(max(values))
    return low if low == high else f"{low} to {high}"


def kind_of(result: CellResult) -> str | None:
    """NaN or Inf: what a failing cell first showed; None where that was not recorded."""
    site = result.outcome.site if result.outcome else None
    return None if site is None else "NaN" if site.kind == "nan" else "Inf"


def kinds(results: Sequence[CellResult]) -> str:
    """`NaN`, `Inf` or `NaN or Inf`, whatever these cells showed."""
    found = {kind for result in results if (kind := kind_of(result))}
    return either(sorted(found, reverse=True)) or "non-finite value"


def part(name: str, levels: Sequence[str]) -> str:
    """One factor's part of a combination: `attention=eager`, or `batch_size` 2 or 8."""
    if len(levels) == 1:
        return code(f"{name}={levels[0]}")
    plain = all(_PLAIN_LEVEL.fullmatch(level) for level in levels)
    return f"{code(name)} {either([level if plain else code(level) for level in levels])}"


def combination(levels: Mapping[str, Sequence[str]]) -> str:
    """`attention=eager` together with `batch_size` 2 or 8: parts of one level come first, they read easier."""
    parts = [part(name, values) for name, values in sorted(levels.items(), key=lambda item: len(item[1]))]
    rest = " and ".join(part for part in (", ".join(parts[1:-1]), *parts[1:][-1:]) if part)
    return " together with ".join(part for part in (parts[0], rest) if part)
