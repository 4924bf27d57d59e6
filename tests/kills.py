"""kill -9 at random moments, then --resume, until the run is done: the harness of a test and of a trial by hand.

    python -m tests.kills COUNT SEED SECONDS OUT -- COMMAND...      (COMMAND runs into OUT and knows --resume)

Each round starts the command, waits a random time up to SECONDS, kills the driver, a shim, a training
process, a server of warm starts or what waits in it for the next attempt, lets the driver go on for a while
where it was another, and then kills that too. Prints what it did; exit 1 if a finished outcome changed, an
attempt was made twice (once more by itself where it shared a process, see `--keep-model`, is none), or a
process was left.
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
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

SETTLE = 10.0


def below(root: int) -> list[psutil.Process]:
    """All descendants of a process."""
    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def victims(driver: int, out: Path) -> dict[str, list[int]]:
    """Process ids by role: servers are below the driver, shims and trainings are in the attempts' notes."""
    shims, mains = [], []
    for path in out.glob("cells/*/attempt-*/pids.json"):
        noted = json.loads(path.read_text())
        if (path.parent / "exit.json").exists():
            continue
        shims += [noted["shim"]["pid"]] if _is(noted["shim"]) else []
        mains += [noted["main"]["pid"]] if _is(noted["main"]) else []
    trainings = [*mains, *(child.pid for main in mains for child in below(main))]
    servers = [child.pid for child in below(driver) if child.pid not in shims + trainings and _is_server(child)]
    forked = [child.pid for server in servers for child in below(server)]
    return {
        "driver": [driver],
        "shim": shims,
        "training": trainings,
        "server": [pid for pid in servers if pid not in forked],
        "waiting": [pid for pid in forked if pid not in shims + trainings],  # forked for an attempt that is to come
    }


def _is(noted: dict[str, float]) -> bool:
    try:
        return bool(psutil.Process(int(noted["pid"])).create_time() == noted["created"])
    except psutil.Error:
        return False


def _is_server(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("server.py") for part in process.cmdline())
    except psutil.Error:
        return False


def outcomes(out: Path) -> dict[str, dict[str, Any]]:
    """Every outcome on disk that somebody may rely on: attempt folder -> its JSON. Killed ones may be made again."""
    found = {}
    for path in sorted(out.glob("cells/*/attempt-*/outcome.json")):
        data = json.loads(path.read_text())
        if data["status"] != "killed":
            found[str(path.parent.relative_to(out))] = data
    return found


def changed(kept: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Attempts whose outcome was lost or is another. A trace, made at the end, adds its origin and notes, no more."""
    return [name for name, before in kept.items() if _less_trace(before, now.get(name)) != before]


def _less_trace(before: dict[str, Any], now: dict[str, Any] | None) -> dict[str, Any] | None:
    if now is None or before["origin"] is not None:
        return now
    added = [note for note in now["doubts"] if note not in before["doubts"]]
    return {**now, "origin": None, "doubts": [note for note in now["doubts"] if note not in added]}


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
    """Start, wait, kill one of the five, and in the end the driver. Says who was killed."""
    resume = ["--resume"] if (out / "run.json").exists() else []
    process = subprocess.Popen([*command, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(rng.uniform(0.0, longest))
    role = rng.choice(["driver", "shim", "training", "server", "waiting"])
    chosen = victims(process.pid, out)[role]
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
        wrong += [f"round {number}: {name} was lost or changed" for name in changed(kept, now)]
        sys.stdout.write(f"round {number}: killed {role}; {len(now)} finished\n")
        sys.stdout.flush()
        kept = now
    resume = ["--resume"] if (out / "run.json").exists() else []
    code = subprocess.call([*command, *resume], stdout=subprocess.DEVNULL)
    sys.stdout.write(f"last: exit code {code}\n")
    now = outcomes(out)
    wrong += [f"at the end: {name} was lost or changed" for name in changed(kept, now)]
    made = [(name.rpartition("/")[0], one["seed"], one["started"] == "kept") for name, one in now.items()]
    wrong += [f"{each[0]} was run twice" for each, times in Counter(made).items() if times > 1]
    deadline = time.monotonic() + SETTLE
    while (left := left_behind(out)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [*wrong, *(f"process {pid} was left" for pid in left)]


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    count, seed, seconds, out = int(arguments[0]), int(arguments[1]), float(arguments[2]), Path(arguments[3])
    wrong = trial(arguments[5:], out, count=count, seed=seed, longest=seconds)
    sys.stdout.writelines(f"{line}\n" for line in wrong or ["nothing lost, nothing run twice, nothing left"])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
