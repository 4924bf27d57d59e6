"""What the trace costs the one step that it looks at, beside what others cost. A benchmark with a table, no test.

    python -m tests.bench.trace [--tokens 64] [--steps 7] [--threads 1] [--model FOLDER]

As tests.bench.overhead: all trainings take their steps in turn, and a step is compared with the plain one of
the same round. Here every step of one training is traced, where a user's has one. "isfinite of every output"
is the naive way: it names no line, and stops at the first mask of -inf. Losses and norms of all trainings
must be the same bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.bench.overhead import CELL, HEAD, PLAIN, Variant, Work, check, machine, measure, table

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
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.trace", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", default="64", help="tokens a step, separated by commas")
    parser.add_argument("--steps", type=int, default=7, help="steps that count")
    parser.add_argument("--threads", type=int, default=1, help="threads of each training")
    parser.add_argument("--model", help="folder of SmolLM2-135M; else a random model of its size")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to see that the benchmark runs")
    arguments = parser.parse_args(argv)
    lines = list(HEAD)
    for tokens in map(int, arguments.tokens.split(",")):
        work = Work(tokens, arguments.threads, arguments.model, arguments.toy)
        rows = measure(work, arguments.steps, VARIANTS)
        check(rows)
        lines += table(tokens, rows)
    lines += ["", f"{arguments.steps} steps each, {machine(arguments.threads)}."]
    lines += ["Losses and gradient norms of all trainings are the same bits."]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
