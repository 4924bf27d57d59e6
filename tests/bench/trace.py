"""What the trace costs the one step that it looks at, beside what others cost. A benchmark with a table, no test.

    python -m tests.bench.trace [--tokens 64] [--steps 7] [--threads 1] [--model FOLDER]

As tests.bench.overhead: all trainings take their steps in turn, and a step is compared with the plain one of
the same round. Here every step of one training is traced, where a user's has one. "isfinite of every output"
is the naive way: it names no line, and stops at the first mask of -inf. Losses and norms of all trainings
must be the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.overhead import CELL, PLAIN, Variant, arguments_for, print_table

TRACED = Variant("the traced step", "trace", "cell")
VARIANTS = (
    PLAIN,
    Variant("plain again"),
    CELL,
    TRACED,
    Variant("detect_anomaly", "anomaly"),
    Variant("isfinite of every output", "naive"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """The table of what the trace costs."""
    parser = arguments_for("python -m tests.bench.trace", __doc__, tokens="64", steps=7)
    print_table(parser.parse_args(argv), VARIANTS)


if __name__ == "__main__":
    main()
