"""The report as GitHub-flavoured Markdown, to paste into an issue.

A comment may hold 65,536 characters. Every section has its share of them and leaves out whole lines
beyond it, saying how many; the table of cells takes what the others leave. Counted in bytes of UTF-8,
which are never fewer than characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nanbisect.report.escape import fenced, table_head, table_row, writer
from nanbisect.report.examples import Example, Pair
from nanbisect.report.findings import CauseReport, tally_words
from nanbisect.report.model import Excerpt, Report, Row
from nanbisect.report.origins import FRAMES, LINKS, RANGES, SDPA, Origin, known_words
from nanbisect.report.places import Place
from nanbisect.report.redact import Redactor
from nanbisect.report.words import clip, code, counted, one_line

LIMIT = 65_000
FOLDED_FROM = 64
LONG, LINE, COMMAND, WORD = 1_800, 1_200, 500, 160
"""The most bytes of one sentence, one item, one command, one word in a table."""
SMALL, MEDIUM, LARGE = 3_000, 4_500, 8_000
BELOW = 16_000  # what follows the cautions takes at most
"""Shares of the sections. With everything at its most they come to some 63,000."""
NEVER_MORE = 50

Item = TypeVar("Item")


def to_markdown(report: Report, redact: Redactor) -> str:
    """The whole report, always under 65,536 characters."""
    page = _Page(report, redact)
    above = [page.head(), page.grid(), page.causes(), page.account(), page.places()]
    above += [page.origins(), page.cautions(), page.neutral(), page.unjudged()]
    if sum(len(block.encode()) + 2 for block in above) > LIMIT - BELOW:
        above[5] = page.origins(brief=True)
    below = [page.environment(), page.next(), page.reproduce(), page.text(report.versions, COMMAND)]
    used = sum(len(block.encode()) + 2 for block in [*above, *below])
    blocks = [*above, page.cells(LIMIT - used), *below]
    return "\n\n".join(block for block in blocks if block) + "\n"


@dataclass(frozen=True)
class _Page:
    """One section a method, each in its own share of the page; empty when there is nothing to say."""

    report: Report
    redact: Redactor

    # text

    def text(self, sentence: str, most: int = LINE) -> str:
        """A sentence, safe outside tables."""
        return writer(self.redact)(sentence, most)

    def cell(self, sentence: str, most: int = WORD) -> str:
        """A sentence, safe in a table."""
        return writer(self.redact, cell=True)(sentence, most)

    def items(self, title: str, sentences: Sequence[str], room: int = SMALL) -> str:
        """A list under a title."""
        if not sentences:
            return ""
        lines = _fitted(sentences, lambda sentence: f"- {self.text(sentence)}", room)
        return f"### {title}\n\n{lines}"

    # sections

    def head(self) -> str:
        """The verdict."""
        report = self.report
        sentences = [report.verdict, report.scope, report.smear or ""]
        title = f"## nanbisect: {self.text(report.name, WORD)}"
        return "\n\n".join([title, *(self.text(sentence, LONG) for sentence in sentences if sentence)])

    def grid(self) -> str:
        """One mark a cell; folded when large."""
        grid = self.report.grid
        if not grid.rows:
            return ""
        names = [self.cell(name) for name in (grid.row_title, *grid.columns)]
        rows = list(zip(grid.rows, grid.marks, strict=True))
        lines = _fitted(rows, lambda row: table_row([self.cell(word) for word in (row[0], *row[1])]), LARGE)
        legend = ", ".join(f"{mark.strip() or 'empty'} {meaning}" for mark, meaning in grid.legend.items())
        columns = self.text(f"Columns: {grid.column_title}.")
        note = f"{columns} {self.text(f'Marks: {legend}.')}" if legend else columns
        head = table_head(names)
        if len(head.encode()) > SMALL:
            return self.text("The grid is too wide for this page; see results.csv.")
        text = f"{head}\n{lines}\n\n{note}"
        title = (
            "The grid, where cells were run" if self.report.account else f"The grid of {counted(grid.cells, 'cell')}"
        )
        return _folded(title, text) if grid.cells > FOLDED_FROM else text

    def causes(self) -> str:
        """Every cause with its evidence, and what made no difference."""
        report = self.report
        lines = _fitted(report.causes, self._cause, LARGE)
        rest = self.text(report.no_difference) if report.no_difference else ""
        body = "\n\n".join(part for part in (lines, rest) if part)
        return f"### {'Causes' if report.causes else 'Settings'}\n\n{body}" if body else ""

    def _cause(self, cause: CauseReport) -> str:
        evidence = "".join(f"\n  - {self.text(sentence, LINE // 2)}" for sentence in cause.evidence)
        return f"- {self.text(f'{cause.words}: {cause.standing}.', LINE // 2)}{evidence}"

    def account(self) -> str:
        """What a search has shown of the cells that it did not run, and what not."""
        return self.items("What was shown", self.report.account)

    def places(self) -> str:
        """Where it surfaced, in which cells."""
        return self.items("Where it surfaced", [_place_words(place) for place in self.report.places], MEDIUM)

    def origins(self, *, brief: bool = False) -> str:
        """Where it was born, as a trace found it: the sentence, then chain, ranges and kernels, folded. `brief`: the
        sentence alone, on a page that has no room for more."""
        if brief:
            shown = _fitted(
                self.report.origins, lambda origin: f"Cell {origin.cell}: {self.text(origin.head)}", SMALL // 2
            )
        else:
            shown = _fitted(self.report.origins, self._origin, LARGE)
        return f"### Where it was born\n\n{shown.rstrip()}" if shown else ""

    def _origin(self, origin: Origin) -> str:
        known = [sentence for found in origin.findings for sentence in known_words(found)]
        lines = _fitted([*known, *origin.notes], lambda note: f"- {self.text(note, LINE // 2)}", SMALL)
        parts = ((LINKS, origin.chain), (RANGES, origin.ranges), (SDPA, origin.kernels), (FRAMES, origin.before))
        tables = [self._table(head, rows) for head, rows in parts if rows]
        whole = "\n\n".join(tables)
        body = f"Cell {origin.cell}: {self.text(origin.head, LINE // 2)}\n\n{lines}"
        more = _folded("The chain, from the birth to where it surfaced, and the numbers", whole) if tables else ""
        return "\n\n".join(part for part in (body, more) if part) + "\n"

    def _table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        lines = _fitted(rows, lambda row: table_row([self.cell(text, WORD // 2) for text in row]), SMALL * 2 // 5)
        return f"{table_head(head)}\n{lines}"

    def cautions(self) -> str:
        """Every doubt with its advice."""
        return self.items("Cautions", [f"{c.text} {c.advice}" for c in self.report.cautions], MEDIUM)

    def neutral(self) -> str:
        """Settings that must not change the mathematics, silent repairs, and doubts that are no caution."""
        report = self.report
        said = {caution.code for caution in report.cautions}
        notes = [*report.repairs, *(doubt for doubt in report.doubts if doubt.code not in said)]
        sections = (
            self.items("Settings that must not change the mathematics", report.neutrality),
            self.items("Silent repairs and doubts", [tally_words(tally) for tally in notes]),
        )
        return "\n\n".join(section for section in sections if section)

    def unjudged(self) -> str:
        """Why cells were not judged, and the end of one log."""
        reasons = self.items("Not judged", [tally_words(tally) for tally in self.report.reasons])
        excerpt = self._excerpt(self.report.excerpt) if self.report.excerpt else ""
        return "\n\n".join(part for part in (reasons, excerpt) if part)

    def _excerpt(self, excerpt: Excerpt) -> str:
        lines = self.redact.redact("\n".join(excerpt.lines)).splitlines()
        short = [_cut(line, WORD) for line in lines]
        return _folded(f"The end of the log of cell {excerpt.number}", fenced(short, "text"))

    def cells(self, room: int) -> str:
        """The table of all cells, in the room that is left."""
        report = self.report
        head = table_head([self.cell(name, WORD // 2) for name in report.columns])
        left = room - len(head.encode()) - 300
        if not report.rows:
            return ""
        lines = _fitted(report.rows, self._row, left) if left > 0 else _left_out(len(report.rows))
        many = counted(len(report.rows), "cell")
        title = f"The {many} that were run" if report.account else f"All {many}"
        return _folded(title, f"{head}\n{lines}" if left > 0 else lines)

    def _row(self, row: Row) -> str:
        return table_row([self.cell(text) for text in row.texts])

    def environment(self) -> str:
        """Device, hardware, versions, and the settings held constant."""
        rows = [*self.report.environment, *(("setting", setting) for setting in self.report.settings)]
        if not rows:
            return ""
        lines = _fitted(rows, lambda row: table_row([self.cell(row[0]), self.cell(row[1], LINE)]), SMALL)
        return _folded("Environment and settings", f"{table_head(['what', 'value'])}\n{lines}")

    def next(self) -> str:
        """What to do next."""
        return self.items("Next", [str(step) for step in self.report.next_steps])

    def reproduce(self) -> str:
        """The command of the run, and those of the cells that show the finding."""
        lines = [self._command(self.report.command)]
        for pair in self.report.pairs:
            lines += [self._command(line) for line in _pair_lines(pair)]
        return f"### Reproduce\n\n{fenced(lines, 'sh')}"

    def _command(self, line: str) -> str:
        return _cut(self.redact.redact(one_line(line)), COMMAND)


def _pair_lines(pair: Pair) -> Iterator[str]:
    yield f"{pair.failing.command}  # non-finite: {_settings(pair.failing)}"
    if pair.neighbour:
        yield f"{pair.neighbour.command}  # finite, differs in {', '.join(pair.neighbour.differs)}"


def _settings(example: Example) -> str:
    return " ".join(example.settings)


def _place_words(place: Place) -> str:
    """`NaN in backward of step 1, ... In 8 cells: 1, 2 ... Then ... Records of that micro-batch: ...`."""
    shown = ", ".join(str(number) for number in place.cells[:NEVER_MORE])
    more = f" and {len(place.cells) - NEVER_MORE} more" if len(place.cells) > NEVER_MORE else ""
    then = (
        f" Next to arrive: {', '.join(code(name) for name in place.parameters[1:4])}." if place.parameters[1:] else ""
    )
    records = f" Records of that {place.of_what} in cell {place.cells[0]}: {', '.join(map(code, place.records[:16]))}."
    origin = f" {place.origin}" if place.origin else ""
    cells = f"In {counted(len(place.cells), 'cell')} ({shown}{more})"
    return f"{place.kind or 'Non-finite'} {place.text}. {cells}.{then}{records if place.records else ''}{origin}"


# room


def _fitted(items: Sequence[Item], render: Callable[[Item], str], room: int) -> str:
    """As many lines as there is room for, and how many were left out. Renders no more than it needs."""
    lines: list[str] = []
    left = room - len(_left_out(len(items)).encode())
    for item in items:
        line = render(item)
        left -= len(line.encode()) + 1
        if left < 0:
            break
        lines.append(line)
    missing = len(items) - len(lines)
    return "\n".join([*lines, *(["", _left_out(missing)] if missing else [])])


def _left_out(rows: int) -> str:
    return f"*{rows} more left out here: see results.csv and result.json in the run folder.*"


def _cut(text: str, most: int) -> str:
    """At most so many bytes of UTF-8, never half a character."""
    short = clip(text, most)
    return short if len(short.encode()) <= most else short.encode()[: most - 3].decode(errors="ignore") + "…"


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"
