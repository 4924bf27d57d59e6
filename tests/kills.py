"""kill -9 at random moments, then --resume, until the run is done: the harness of a test and of a trial by hand.

    python -m tests.kills COUNT SEED OUT -- COMMAND...      (COMMAND runs into OUT and knows --resume)

Each round starts the command, waits a random time, kills the driver, a shim or a training process, lets a
killed shim's or training's driver go on for a while, and then kills that too. Prints what it did; exit 1
if a finished outcome changed, an attempt was made twice, or a process was left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

SETTLE = 10.0


def below(root: int) -> list[psutil.Process]:
    """All descendants of a process."""
    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def victims(driver: int) -> dict[str, list[int]]:
    """Process ids by role. A shim is the driver's child; what is below it is the training."""
    shims = [child for child in _children(driver) if _is_shim(child)]
    trainings = [child.pid for shim in shims for child in below(shim.pid)]
    return {"driver": [driver], "shim": [shim.pid for shim in shims], "training": trainings}


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _is_shim(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("shim.py") for part in process.cmdline())
    except psutil.Error:
        return False


def outcomes(out: Path) -> dict[str, dict[str, object]]:
    """Every outcome on disk that somebody may rely on: attempt folder -> its JSON. Killed ones may be made again."""
    found = {}
    for path in sorted(out.glob("cells/*/attempt-*/outcome.json")):
        data = json.loads(path.read_text())
        if data["status"] != "killed":
            found[str(path.parent.relative_to(out))] = data
    return found


def left_behind(out: Path) -> list[int]:
    """Processes that carry the mark of an attempt of this run."""
    marked = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get("NANBISECT_ATTEMPT", "")
            if process.status() != psutil.STATUS_ZOMBIE and Path(mark).is_relative_to(out.resolve()) and mark:
                marked.append(process.pid)
        except psutil.Error:
            continue
    return marked


def round_of_kills(command: list[str], out: Path, rng: random.Random, longest: float) -> str:
    """Start, wait, kill one of the three, and in the end the driver. Says who was killed."""
    resume = ["--resume"] if (out / "run.json").exists() else []
    process = subprocess.Popen([*command, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(rng.uniform(0.0, longest))
    role = rng.choice(["driver", "shim", "training"])
    chosen = victims(process.pid)[role]
    for pid in chosen[:1]:
        _kill(pid)
    if role != "driver":
        time.sleep(rng.uniform(0.0, longest / 2))
    _kill(process.pid)
    process.wait()
    return role if chosen else f"{role} (none there)"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def trial(command: list[str], out: Path, *, count: int, seed: int, longest: float) -> list[str]:
    """`count` rounds, then to the end. Returns what went wrong."""
    rng, wrong, kept = random.Random(seed), [], outcomes(out)
    for number in range(1, count + 1):
        role = round_of_kills(command, out, rng, longest)
        now = outcomes(out)
        wrong += [f"round {number}: {name} was lost or changed" for name in kept if now.get(name) != kept[name]]
        sys.stdout.write(f"round {number}: killed {role}; {len(now)} finished\n")
        sys.stdout.flush()
        kept = now
    resume = ["--resume"] if (out / "run.json").exists() else []
    code = subprocess.call([*command, *resume], stdout=subprocess.DEVNULL)
    sys.stdout.write(f"last: exit code {code}\n")
    now = outcomes(out)
    wrong += [f"at the end: {name} was lost or changed" for name in kept if now.get(name) != kept[name]]
    cells = [name.rpartition("/")[0] for name in now]
    wrong += [f"{name} was run twice" for name in sorted(set(cells)) if cells.count(name) > 1]
    deadline = time.monotonic() + SETTLE
    while (left := left_behind(out)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [*wrong, *(f"process {pid} was left" for pid in left)]


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    count, seed, out = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    wrong = trial(arguments[4:], out, count=count, seed=seed, longest=12.0)
    sys.stdout.writelines(f"{line}\n" for line in wrong or ["nothing lost, nothing run twice, nothing left"])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
