"""The command line as a user has it: a process, its exit code, what it printed, the result it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def refused(self, *words: str) -> None:
        """Exit code 2, one message with these words and something to try, no traceback."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert "Traceback" not in self.err + self.out
        for word in words:
            assert word in self.err, self.err


def nanbisect(*arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    """Run `nanbisect ...` to its end."""
    command = [sys.executable, "-m", "nanbisect", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def result(folder: Path) -> dict[str, Any]:
    """`result.json` of a run."""
    data: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return data
