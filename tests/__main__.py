"""The one test command: `python -m tests`. Lint, format, types, tests; stops at the first that fails."""

from __future__ import annotations

import subprocess
import sys
import time

STEPS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("pytest", "-q", "-n", "2", "--dist", "worksteal", "--durations", "10"),
)


def main() -> int:
    """The code of the first step that fails, else 0."""
    for step in STEPS:
        sys.stdout.write(f"== {' '.join(step)}\n")
        sys.stdout.flush()
        began = time.monotonic()
        code = subprocess.call([sys.executable, "-m", *step, *(sys.argv[1:] if step[0] == "pytest" else [])])
        sys.stdout.write(f"== {step[0]}: {'ok' if code == 0 else 'failed'} in {time.monotonic() - began:.0f} s\n")
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
