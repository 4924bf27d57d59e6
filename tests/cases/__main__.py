"""Run the cases and print what each aid says of them.

    python -m tests.cases [NAME...] [--write]

`masked_rows` stands for all its arguments. With `--write` the table goes into tests/cases/README.md. The exit code
is 1 if nanbisect was wrong about any.
"""

from __future__ import annotations

import argparse
import sys

from tests.cases.bank import chosen
from tests.cases.runner import Host
from tests.cases.table import COLUMNS, Row, row, summary, write


def main() -> int:
    """All cases in one table, each as it is done."""
    parser = argparse.ArgumentParser(prog="python -m tests.cases")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write the table of all cases beside them")
    wanted = parser.parse_args()
    if wanted.write and wanted.names:
        parser.error("--write is for all cases: name none")
    rows = []
    with Host(probe=True) as watched, Host(probe=False) as plain:
        for case in chosen(wanted.names):
            rows.append(row(watched, plain, case))
            sys.stdout.write(_shown(rows[-1]))
            sys.stdout.flush()
    sys.stdout.write("\n".join(summary(rows)) + "\n")
    if wanted.write:
        write(rows)
    return int(any(row.wrong for row in rows))


def _shown(row: Row) -> str:
    first, *others = row.cells
    lines = (f"  {column:23}{cell}" for column, cell in zip(COLUMNS[1:], others, strict=True))
    return "\n".join((f"{first}: {row.case.about}", *lines, "\n"))


if __name__ == "__main__":
    sys.exit(main())
