"""What `check.sh` runs: the doctor, slots, memory, SDPA kernels and the bf16 demo on CUDA. Prints a line a fact."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
KERNELS = "sdpa:math|sdpa:efficient|sdpa:flash|sdpa:cudnn|eager|flash"


def run(out: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """`nanbisect run` of the demo with these flags: exit code and result."""
    command = [
        sys.executable,
        "-m",
        "nanbisect",
        "run",
        "matrices/demo.yaml",
        "--out",
        str(out),
        "--device",
        "cuda",
        *flags,
    ]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    say(f"{' '.join(command[3:])}: exit code {done.returncode} in {time.monotonic() - began:.0f} s")
    path = out / "result.json"
    if not path.is_file():
        sys.stdout.write(done.stdout + done.stderr)
        return done.returncode, {"cells": [], "causes": [], "counts": {}, "environment": {}}
    result: dict[str, Any] = json.loads(path.read_text())
    return done.returncode, result


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def expect(wrong: list[str], holds: bool, what: str) -> None:
    """Note what does not hold."""
    say(f"{'ok  ' if holds else 'FAIL'} {what}")
    if not holds:
        wrong.append(what)


def demo(out: Path, wrong: list[str]) -> None:
    """The demo's cause on CUDA, at the size that fits the time: 12 cells without the neutral factors."""
    fixed = ("--set", "gradient_checkpointing=on", "--set", "channel_weights=1,8", "--factor", "batch_size=1|8")
    code, result = run(out / "demo", *fixed)
    expect(wrong, code == 1, "the demo ends with exit code 1")
    levels = [cause["levels"] for cause in result["causes"]]
    expect(wrong, levels == [{"batch_size": ["8"], "attention": ["eager"]}], f"one cause, of two parts: {levels}")
    expect(wrong, str(result["environment"].get("device", "")).startswith("cuda"), "the verdict is of CUDA")
    judged = [cell for cell in result["cells"] if cell["status"] in ("finite", "nonfinite")]
    for cell in judged:
        say(f"     {cell['id']}: {cell['status']}, {cell['resolved'].get('kernels')}, {cell['seconds']:.1f} s")
    memory = [cell.get("memory_bytes") or 0 for cell in judged]
    expect(
        wrong,
        bool(memory) and all(memory),
        f"peak device memory is known: {max(memory, default=0) / 2**20:.0f} MiB at most",
    )


def doctor(out: Path, wrong: list[str]) -> None:
    """What the doctor says of this machine; its kernels must be those that train (see `kernels`)."""
    command = [sys.executable, "-m", "nanbisect", "doctor", "--json", "matrices/demo.yaml"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    say(f"doctor: exit code {done.returncode} in {time.monotonic() - began:.0f} s")
    (out / "doctor.json").write_text(done.stdout)
    if not done.stdout:
        sys.stdout.write(done.stderr)
        return expect(wrong, False, "the doctor answers")
    document = json.loads(done.stdout)
    for row in document["rows"]:
        say(f"     {row['state']:8}{row['name']:16}{row['found']} {row['means']} {row['mend']}")
    for gpu in document["facts"]["gpus"]["devices"]:
        say(f"     {json.dumps(gpu)}")
    levels = {f"{item['setting']}={item['level']}": item["runs"] for item in document["matrix"]["levels"]}
    say(f"     {levels}")
    expect(wrong, done.returncode == 0 and document["device"] == "cuda", "the doctor finds a GPU that computes")
    states = {row["name"].removesuffix(".0"): row["state"] for row in document["rows"]}
    expect(wrong, states["gpu"] != "missing" and states["sdpa.math"] == "ok", f"and torch works on it: {states}")
    nodes = {t["node"] for entry in document["facts"]["kernels"] for t in entry["trials"] if not t["error"]}
    return say(f"     nodes that ran: {sorted(nodes)}")


def kernels(out: Path, wrong: list[str]) -> None:
    """Every SDPA kernel: took effect, or is not judged and says why."""
    fixed = ("--set", "gradient_checkpointing=off", "--set", "channel_weights=1,8", "--set", "padding_side=right")
    _, result = run(
        out / "kernels", *fixed, "--factor", "batch_size=1|2", "--factor", f"attention={KERNELS}", "--steps", "1"
    )
    for cell in result["cells"]:
        say(f"     {cell['id']}: {cell['status']} {cell['resolved'].get('kernels')} {cell.get('reason', '')[:90]}")
    finite = {cell["levels"]["attention"] for cell in result["cells"] if cell["status"] == "finite"}
    expect(wrong, {"sdpa:math", "eager"} <= finite, f"these kernels trained and were seen: {sorted(finite)}")
    told = json.loads((out / "doctor.json").read_text() or '{"rows": []}')["rows"]
    rows = [row for row in told if row["name"].startswith("sdpa.") and row["state"] != "missing"]
    runs = {f"sdpa:{row['name'].split('.')[1]}" for row in rows}
    trained = {name for name in finite if name.startswith("sdpa:")}
    expect(wrong, trained <= runs, f"the doctor had said so of each kernel that trained: {sorted(runs)}")


def slots(out: Path, wrong: list[str]) -> None:
    """One cell a GPU: with a single GPU named, every cell ran there."""
    flags = (
        "--set",
        "gradient_checkpointing=off",
        "--set",
        "channel_weights=1,8",
        "--set",
        "attention=sdpa",
        "--gpus",
        "0",
    )
    _, result = run(out / "slots", *flags, "--factor", "batch_size=1|8", "--steps", "1")
    expect(wrong, result["counts"] == {"finite": 2}, f"two cells on GPU 0: {result['counts']}")


def memory(out: Path, wrong: list[str]) -> None:
    """A batch too large for the device is out_of_memory, not a finding."""
    flags = ("--set", "gradient_checkpointing=off", "--set", "channel_weights=1,8", "--set", "attention=eager")
    _, result = run(
        out / "memory", *flags, "--set", "padding_side=right", "--factor", "batch_size=1|60000", "--steps", "1"
    )
    statuses = {cell["levels"]["batch_size"]: cell["status"] for cell in result["cells"]}
    expect(wrong, statuses.get("60000") == "out_of_memory", f"a batch of 60000 runs out of memory: {statuses}")


def main(arguments: Sequence[str]) -> int:
    """All checks; 1 if one does not hold."""
    out, wrong = Path(arguments[0]), list[str]()
    for part in (doctor, demo, kernels, slots, memory):
        part(out, wrong)
    say("all hold" if not wrong else f"{len(wrong)} do not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
