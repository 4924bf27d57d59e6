"""What the probe costs a training, beside what others cost. A benchmark with a table, not a timed test.

    python -m tests.bench.overhead [--tokens 64,1024] [--steps 20] [--threads 1] [--model FOLDER]

All trainings run at once, each in a process of its own, and take their steps in turn: one at a time, the
first of a round another one each time. So noise of the machine (5 to 8 percent here) hits all alike, and a
step is compared with the plain one of the same round. "plain again" says how far two equal trainings
differ. The probe's own share comes from its own clock: the seconds that it wrote for each step, over the
seconds of these steps. Losses and norms of all trainings must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from nanbisect.store import read_evidence
from nanbisect.trainers.base import probe_environment
from nanbisect.watch import probe_limits

ROOT = Path(__file__).parents[2]
WARM_UP = 5  # steps that don't count: the first ones allocate, and the probe looks at all there is
COUNTED = (20, 40)  # a watched command is looked at in full after every twentieth step, and written up to the 50th


class Variant(NamedTuple):
    """One way to train. `aid`: what the script itself switches on. `probe`: watch, cell, or none."""

    name: str
    aid: str = "none"
    probe: str | None = None


PLAIN = Variant("plain")
WATCH = Variant("nanbisect watch", probe="watch")
CELL = Variant("a cell of nanbisect run", probe="cell")
VARIANTS = (
    PLAIN,
    Variant("plain again"),
    WATCH,
    CELL,
    Variant("detect_anomaly", "anomaly"),
    Variant("DebugUnderflowOverflow", "underflow"),
)


class Work(NamedTuple):
    """What all trainings do."""

    tokens: int
    threads: int = 1
    model: str | None = None
    toy: bool = False


@dataclass
class Training:
    """A process that waits for its turn, and what it has told so far."""

    variant: Variant
    process: subprocess.Popen[str]
    events: Path | None
    steps: list[dict[str, Any]] = field(default_factory=list)

    def hear(self) -> dict[str, Any]:
        """Its next line; an error if it has died."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"the training {self.variant.name!r} ended with code {self.process.wait()}")
        said: dict[str, Any] = json.loads(text)
        return said

    def step(self) -> None:
        """One step, alone on the machine as far as this benchmark is concerned."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(self.hear())

    def end(self) -> None:
        """No more steps; the process ends by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait() != 0:
            raise RuntimeError(f"the training {self.variant.name!r} ended with code {self.process.returncode}")


class Row(NamedTuple):
    """One line of the table. Seconds and ratios over the counted steps; `share` by the probe's own clock."""

    variant: Variant
    seconds: float
    ratios: tuple[float, float, float]  # lower quartile, median, upper quartile of the paired ones
    share: float | None
    peak: int
    bits: tuple[str, ...]


# trainings ------------------------------------------------------------------------------------------


def environment(variant: Variant, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that `nanbisect watch` or a cell sets, or none."""
    env = {name: value for name, value in inherited.items() if not name.startswith("NANBISECT_")}
    if variant.probe is not None:
        env |= probe_environment(folder, env)
    return env | (probe_limits(steps=None, stop=False) if variant.probe == "watch" else {})


def start(variant: Variant, work: Work, folder: Path) -> Training:
    """A process that loads its model and waits."""
    command = [sys.executable, "-m", "tests.bench.training", "--aid", variant.aid, "--tokens", str(work.tokens)]
    command += ["--threads", str(work.threads), *(["--model", work.model] if work.model else [])]
    command += ["--toy"] if work.toy else []
    env = environment(variant, folder, os.environ) | {"OMP_NUM_THREADS": str(work.threads)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return Training(variant, process, folder if variant.probe else None)


def measure(work: Work, steps: int, variants: Sequence[Variant] = VARIANTS) -> list[Row]:
    """Train all variants in turn. The first of `variants` is what the others are compared with."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nanbisect-bench-")))
        trainings = []
        for index, variant in enumerate(variants):
            events = folder / str(index)
            events.mkdir()
            trainings.append(start(variant, work, events))
            process = stack.enter_context(trainings[-1].process)
            stack.callback(process.kill)  # before it is waited for; nothing where it ended well
        for training in trainings:
            training.hear()
        for number in range(WARM_UP + steps):
            first = number % len(trainings)
            for training in trainings[first:] + trainings[:first]:
                training.step()
        for training in trainings:
            training.end()
        return [row(training, trainings[0]) for training in trainings]


def row(training: Training, plain: Training) -> Row:
    """What one training's steps come to."""
    seconds = [step["seconds"] for step in training.steps[WARM_UP:]]
    others = [step["seconds"] for step in plain.steps[WARM_UP:]]
    lower, middle, upper = statistics.quantiles([a / b for a, b in zip(seconds, others, strict=True)], n=4)
    own = own_clock(training.events, len(training.steps))[WARM_UP:] if training.events else None
    return Row(
        training.variant,
        statistics.median(seconds),
        (lower, middle, upper),
        None if own is None else sum(own) / sum(seconds),
        training.steps[-1]["peak"],
        tuple(bits for step in training.steps for bits in step["bits"]),
    )


def own_clock(folder: Path, steps: int) -> list[float]:
    """The probe's own seconds in each step, as it wrote them; an error if it missed a step or saw something bad."""
    evidence = read_evidence(folder)
    own = [line["probe_seconds"] for line in evidence.events("step")]
    if len(own) != steps or evidence.lost or evidence.events("nonfinite") or evidence.events("probe_error"):
        raise RuntimeError("the probe saw something other than healthy training, or lost lines")
    return own


def check(rows: Sequence[Row]) -> None:
    """Losses and norms of all trainings are the same bits."""
    for each in rows:
        if each.bits != rows[0].bits:
            raise RuntimeError(f"losses or norms of {each.variant.name!r} differ from the plain ones")


# the table ------------------------------------------------------------------------------------------


def table(tokens: int, rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown."""
    plain = rows[0]
    return [
        f"| {each.variant.name} | {tokens:,} | {each.seconds:.3f} s | {ratio(each, plain)} "
        f"| {'' if each.share is None else f'{each.share:.1%}'} | {each.peak / plain.peak - 1:+.1%} |"
        for each in rows
    ]


def ratio(each: Row, plain: Row) -> str:
    """The paired ratio with its quartiles; the plain one is the measure itself."""
    if each is plain:
        return "1"
    lower, middle, upper = each.ratios
    return f"{middle:.3f} ({lower:.3f} to {upper:.3f})"


HEAD = (
    "| training | tokens a step | time of a step | ratio to plain (quartiles) | own clock | peak memory |",
    "| --- | ---: | ---: | ---: | ---: | ---: |",
)


def machine(threads: int) -> str:
    """This machine in a line."""
    return (
        f"{processor()}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''} a training; "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )


def processor() -> str:
    """The model's name of the first core, where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def arguments_for(prog: str, doc: str | None, *, tokens: str, steps: int) -> argparse.ArgumentParser:
    """The options that the benchmarks of a step share, with their own defaults."""
    parser = argparse.ArgumentParser(prog=prog, description=(doc or "").split("\n")[0])
    parser.add_argument("--tokens", default=tokens, help="tokens a step, separated by commas")
    parser.add_argument("--steps", type=int, default=steps, help="steps that count")
    parser.add_argument("--threads", type=int, default=1, help="threads of each training")
    parser.add_argument("--model", help="folder of SmolLM2-135M; else a random model of its size")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to see that the benchmark runs")
    return parser


def print_table(arguments: argparse.Namespace, variants: Sequence[Variant]) -> None:
    """Measure and print."""
    lines = list(HEAD)
    for tokens in map(int, arguments.tokens.split(",")):
        work = Work(tokens, arguments.threads, arguments.model, arguments.toy)
        rows = measure(work, arguments.steps, variants)
        check(rows)
        lines += table(tokens, rows)
    lines += ["", f"{arguments.steps} steps each, {machine(arguments.threads)}."]
    lines += ["Losses and gradient norms of all trainings are the same bits."]
    sys.stdout.write("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """The table of what the probe costs."""
    parser = arguments_for("python -m tests.bench.overhead", __doc__, tokens="64,1024", steps=20)
    arguments = parser.parse_args(argv)
    if arguments.steps not in COUNTED:
        parser.error(f"--steps: one of {', '.join(map(str, COUNTED))}")
    print_table(arguments, VARIANTS)


if __name__ == "__main__":
    main()
