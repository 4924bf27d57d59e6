"""What nanbisect's trace, `detect_anomaly` and `DebugUnderflowOverflow` say of one training: each is run, and read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from nanbisect.outcome import Outcome
from nanbisect.watch import watched
from tests.cases.bank import HERE, Case
from tests.cases.host import ANOMALY, UNDERFLOW

PROBE = HERE.parents[1] / "nanbisect" / "probe"
Line = Mapping[str, Any]
SILENT = "silent"


class Host:
    """A warm process that runs trainings, one at a time; a context manager. `probe`: has the probe in it."""

    def __init__(self, *, probe: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        dropped = ("NANBISECT_", "PYTHONPATH", "RANK")
        env = {key: value for key, value in os.environ.items() if not key.startswith(dropped)} | {
            "OMP_NUM_THREADS": "1"
        }
        if probe:
            env |= {"NANBISECT_PROBE": self.folder.name, "PYTHONPATH": str(PROBE / "site")}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "host.py"), *([] if probe else ["underflow"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.folder.cleanup()

    def train(self, case: Case, *, aid: str | None = None, **env: str) -> Path:
        """Run the training to its end. Returns the folder of what it left."""
        folder = Path(tempfile.mkdtemp(dir=self.folder.name))
        job = {"script": str(case.script), "arguments": case.arguments, "folder": str(folder), "aid": aid, "env": env}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        code = self.process.stdout.readline()
        if not code or int(code) < 0:
            raise RuntimeError(f"{case.name} was ended by signal {code.strip()}: {(folder / 'err.txt').read_text()}")
        return folder


# nanbisect -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """Where it surfaced (None: nowhere); of the traced process what its trace says, its outcome, the probe's errors."""

    event: Line | None
    origin: Line | None
    outcome: Outcome
    errors: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the trace names an origin."""
        return self.origin is not None and bool(self.origin["found"])


def trace(host: Host, case: Case) -> Traced:
    """Watch the training, and trace the step in which a non-finite value surfaced; step 1 where none did."""
    event = next(iter(_lines(host.train(case, NANBISECT_STOP="event"), "nonfinite")), None)
    folder = host.train(case, NANBISECT_STOP="event", NANBISECT_TRACE=str(event["step"] if event else 1))
    origin = next(iter(_lines(folder, "origin")), None)
    errors = [str(line["error"]) for line in _lines(folder, "probe_error")]
    return Traced(event, origin, watched(folder, 0).outcome, tuple(errors))


def _lines(folder: Path, kind: str) -> list[Line]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("events.*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return [line for line in lines if line["kind"] == kind]


# the other aids --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """An aid's message in short, with the line (of the script) or the module that it names, if any."""

    text: str
    line: int | None = None
    module: str | None = None

    def hits(self, case: Case) -> bool:
        """Whether it names the origin's line, or its module."""
        truth = case.truth
        return truth is not None and (
            self.line == truth.line or (self.module is not None and self.module == truth.module)
        )

    def words(self, case: Case) -> str:
        """The message, and whether it leads to the origin."""
        if not self.hits(case):
            return self.text
        return f"{self.text}: the origin's {'module' if self.line is None else 'line'}"


def anomaly(host: Host, case: Case) -> Said:
    """What `torch.autograd.set_detect_anomaly(True)` says: the function, and the line of its forward traceback."""
    errors = (host.train(case, aid=ANOMALY) / "err.txt").read_text(encoding="utf-8")
    found = re.search(r"Function '(\w+)' returned nan values", errors)
    if found is None:
        return _failed(errors)
    forward = errors.partition("Traceback of forward call that caused the error")[2].partition("Traceback (most")[0]
    lines = re.findall(rf'File "{re.escape(str(case.script))}", line (\d+)', forward)
    return Said(f"{found[1]}, line {lines[-1]}", line=int(lines[-1])) if lines else Said(found[1])


def underflow(host: Host, case: Case) -> Said:
    """What transformers' `DebugUnderflowOverflow(model)` says: the module of its last frame, and what was bad there."""
    folder = host.train(case, aid=UNDERFLOW)
    out, errors = ((folder / name).read_text(encoding="utf-8") for name in ("out.txt", "err.txt"))
    if "inf/nan detected" not in errors:
        return _failed(errors)
    bad = re.findall(r"^(.+) has (nan|inf)s$", out, re.M)
    module, kind = re.findall(r"^ {18}(\S*) (\w+)$", out, re.M)[-1]
    return Said(
        f"{f'{module} ({kind})' if module else kind}: {', '.join(f'{what} in {name}' for name, what in bad)}",
        module=module,
    )


def _failed(errors: str) -> Said:
    """Nothing found; or an error of the aid's own on the way."""
    last = errors.strip().splitlines()[-1:] if "Traceback (most recent call last)" in errors else []
    return Said(f"stops with {last[0]}" if last else SILENT)
