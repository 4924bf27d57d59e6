"""The table of all cases: what is true, and what each aid said of the same training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from tests.cases.bank import HERE, Case, Truth
from tests.cases.runner import SILENT, Host, Said, anomaly, trace, underflow
from tests.cases.verdict import words, wrong

README = HERE / "README.md"
MARK = "<!-- what follows is written by python -m tests.cases --write -->\n"
COLUMNS = ("case", "truth", "nanbisect", "detect_anomaly", "DebugUnderflowOverflow")


@dataclass(frozen=True)
class Row:
    """One training. `wrong`: what is not true of what nanbisect says."""

    case: Case
    nanbisect: str
    wrong: tuple[str, ...]
    anomaly: Said
    underflow: Said

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with the training."""
        return self.case.truth is None

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of COLUMNS."""
        trace = f"wrong: {self.nanbisect} ({'; '.join(self.wrong)})" if self.wrong else f"right: {self.nanbisect}"
        return (
            self.case.name,
            _truth(self.case),
            trace,
            self.anomaly.words(self.case),
            self.underflow.words(self.case),
        )


def row(watched: Host, plain: Host, case: Case) -> Row:
    """Run the training under each aid. `watched` has the probe, `plain` has not."""
    traced = trace(watched, case)
    return Row(case, words(traced), wrong(case, traced), anomaly(plain, case), underflow(plain, case))


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """How many each got right; counted."""
    sick, well = [row for row in rows if not row.healthy], [row for row in rows if row.healthy]
    if sick:
        of = f"of {len(sick)} faulty trainings"
        yield f"nanbisect names phase, operation, module and line in {sum(not row.wrong for row in sick)} {of}"
        silent = sum(row.anomaly.text == SILENT for row in sick)
        line = sum(row.anomaly.hits(row.case) for row in sick)
        yield f"detect_anomaly names the origin's line in {line} {of}, and is silent in {silent}"
        silent = sum(row.underflow.text == SILENT for row in sick)
        module = sum(row.underflow.hits(row.case) for row in sick)
        yield f"DebugUnderflowOverflow names the origin's module in {module} {of}, and is silent in {silent}"
    if well:
        yield f"nanbisect names no origin in {sum(not row.wrong for row in well)} of {len(well)} healthy trainings"


def page(rows: Sequence[Row]) -> str:
    """The written part of the README."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    lines = [f"With {versions}, on a CPU:", "", *(f"- {line}" for line in summary(rows)), ""]
    for title, chosen in (("Faulty", False), ("Healthy", True)):
        lines += [f"## {title}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [*(_line(row.cells) for row in rows if row.healthy is chosen), ""]
    return "\n".join(lines[:-1]) + "\n"


def write(rows: Sequence[Row]) -> None:
    """Put the table into the README beside the cases; what stands before it stays."""
    before = README.read_text(encoding="utf-8").split(MARK)[0]
    README.write_text(before + MARK + "\n" + page(rows), encoding="utf-8")


def row_start(case: Case) -> str:
    """What the table says of a case whatever the aids say."""
    return _line((case.name, _truth(case)))[:-1]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _truth(case: Case) -> str:
    truth = case.truth
    return "nothing is wrong" if truth is None else f"{_what(truth)}: {_where(case, truth)}"


def _what(truth: Truth) -> str:
    name = truth.details.get("name")
    return f"{' or '.join(truth.kinds)} in {truth.phase}" + (f" (`{name}`)" if name else "")


def _where(case: Case, truth: Truth) -> str:
    operations = " or ".join(operation.removeprefix("aten.") for operation in truth.operations)
    return ", ".join(part for part in (operations, truth.module, f"{case.script.name}:{truth.line}") if part)
