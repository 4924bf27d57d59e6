"""Text that is safe to paste into a GitHub comment: inert, on one line, and no longer than asked.

Data and logs may hold anything: table pipes, HTML, links, mentions, references to issues. GitHub looks
for mentions and references after it has rendered the Markdown, so a backslash does not stop them; an
invisible space (`&#8203;`) inside does, and so does a code span.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from nanbisect.report.redact import Redactor
from nanbisect.report.words import clip, one_line

LONGEST_RAW = 20_000
_SPAN = re.compile(r"`([^`]+)`")
_SPECIAL = re.compile(
    r"(?P<mention>@)(?=\w)"
    r"|(?P<issue>\#)(?=\d)"
    r"|(?P<gh>\b[Gg][Hh]-)(?=\d)"
    r"|(?P<link>:)(?=//)"
    r"|(?P<www>\b[Ww]{3})(?=\.)"
    r"|(?P<scheme>\b(?:mailto|xmpp):)"
    r"|(?P<intraword>(?<=[A-Za-z0-9])_+(?=[A-Za-z0-9]))"
    r"|(?P<entity>[&<>$|])"
    r"|(?P<other>[\\`*_\[\]~#!])"
)
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "|": "&#124;"}


def escaped(text: str) -> str:
    """Plain text as Markdown shows it, with nothing in it alive."""
    return _SPECIAL.sub(_dead, text)


def _dead(match: re.Match[str]) -> str:
    kind, text = match.lastgroup, match[0]
    if kind == "intraword":
        return text
    if kind == "entity":
        return _ENTITIES[text]
    return f"\\{text}" if kind == "other" else f"{text}&#8203;"


def rendered(sentence: str) -> str:
    """A sentence with its code spans; everything else escaped."""
    parts = _SPAN.split(sentence)
    return "".join(_span(part) if index % 2 else escaped(part) for index, part in enumerate(parts))


def _span(text: str) -> str:
    return f"`{text}`" if text.strip() else ""


def writer(redact: Redactor, *, cell: bool = False) -> Callable[[str, int], str]:
    """A function that redacts, cuts and renders a sentence in at most so many bytes.

    In a table's `cell` there are no code spans, because a pipe after a backslash could leave them.
    """
    render = escaped if cell else rendered

    def write(sentence: str, most: int) -> str:
        text = redact.redact(one_line(sentence[:LONGEST_RAW]))
        length = most
        while len((line := render(clip(text, length))).encode()) > most:
            length = length * 3 // 4
        return line

    return write


def table_row(cells: Sequence[str]) -> str:
    """One row of a table, from rendered cells."""
    return f"| {' | '.join(cells)} |"


def table_head(names: Sequence[str]) -> str:
    """The head of a table with the line below it."""
    return f"{table_row(names)}\n{table_row(['---'] * len(names))}"


def fenced(lines: Sequence[str], language: str = "") -> str:
    """A code block that no line inside can close."""
    text = "\n".join(lines)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
