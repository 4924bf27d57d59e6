"""What `check.sh` runs: the doctor, slots, memory, SDPA kernels and the bf16 demo on CUDA, also warm and with
`--keep-model`. Prints a line a fact.

What needs several GPUs is left out, and said so, where there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
KERNELS = "sdpa:math|sdpa:efficient|sdpa:flash|sdpa:cudnn|eager|flash"


TRAINING = """
import json, os, sys, time
began = time.time()
import torch
rank = int(os.environ.get("LOCAL_RANK", "0"))
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
torch.cuda.set_device(rank)
model = torch.nn.Linear(8, 8, device="cuda")
if "RANK" in os.environ:
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
    model(torch.randn(4, 8, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
gpus, port = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("MASTER_PORT")
seen = [gpus, torch.cuda.device_count(), port, began, time.time()]
with open(os.path.join(sys.argv[3], "seen.%d.json" % rank), "w") as file:
    json.dump(seen, file)
"""
HOLDER = """
import sys, time, torch
free, total = torch.cuda.mem_get_info(0)
held = torch.empty(int(float(sys.argv[1]) * total), dtype=torch.uint8, device="cuda:0")
sys.stdout.write("holding\\n")
sys.stdout.flush()
time.sleep(float(sys.argv[2]))
"""


def run(out: Path, *flags: str, matrix: str = "matrices/demo.yaml") -> tuple[int, dict[str, Any]]:
    """`nanbisect run` of the demo, or of another matrix, with these flags: exit code and result."""
    command = [
        sys.executable,
        "-m",
        "nanbisect",
        "run",
        matrix,
        "--out",
        str(out),
        "--device",
        "cuda",
        *flags,
    ]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    out.with_suffix(".txt").write_text(done.stdout)
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


def starts(out: Path, wrong: list[str]) -> None:
    """The same cells cold, warm and in one process that keeps its model: the same statuses, cause and losses."""
    fixed = ("--set", "channel_weights=1,8", "--factor", "batch_size=1|8", "--factor", "attention=sdpa|eager")
    seen = {}
    for name, flags in (("cold", ("--cold",)), ("warm", ()), ("kept", ("--keep-model",))):
        began = time.monotonic()
        _, result = run(out / f"starts-{name}", *fixed, *flags)
        say(f"     {name}: {time.monotonic() - began:.1f} s for {len(result['cells'])} cells and the check")
        ways = [[attempt.get("started") for attempt in cell["attempts"]] for cell in result["cells"]]
        say(f"     {name}: {ways}")
        expect(wrong, bool(ways) and all(row[:1] == [name] for row in ways), f"every cell started {name}")
        causes = [(cause["levels"], cause["standing"]) for cause in result["causes"]]
        ends = [(cell["id"], cell["status"], cell["loss"], cell["grad_norm"]) for cell in result["cells"]]
        seen[name] = ends, causes
    for name in ("warm", "kept"):
        (cold, causes), (ends, others) = seen["cold"], seen[name]
        expect(wrong, [e[:2] for e in ends] == [e[:2] for e in cold] and others == causes, f"{name}: the same verdict")
        moved = [one[0] for one, other in zip(ends, cold, strict=False) if one[2][:1] != other[2][:1]]
        expect(wrong, not moved, f"{name}: the first loss is the same to the bit: {moved or 'everywhere'}")
        later = [one[0] for one, other in zip(ends, cold, strict=False) if one[2:] != other[2:]]
        say(f"     {name}: other losses or norms (a gradient may be added up in any order): {later or 'none'}")


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


def waits(out: Path, command: str, *, width: int, cells: str) -> str:
    """A matrix of trainings that write down what they see and when; the path of its file."""
    out.mkdir(exist_ok=True)
    (out / "train.py").write_text(TRAINING)
    text = f"""\
name: waits
trainer: command
command: [{command}, train.py, "{{steps}}", "{{wait}}", "{{cell_dir}}"]
steps: 2
device: cuda
gpus_per_cell: {width}
factors: {{wait: [{cells}]}}
"""
    (out / "waits.yaml").write_text(text)
    return str(out / "waits.yaml")


def seen_in(folder: Path) -> list[tuple[list[str], int, str | None, float, float]]:
    """What each training saw: its GPUs, how many CUDA counted, its port, when it began and ended."""
    found = [json.loads(path.read_text()) for path in sorted(folder.rglob("seen.0.json"))]
    return [(names.split(","), count, port, began, ended) for names, count, port, began, ended in found]


def together(seen: list[tuple[list[str], int, str | None, float, float]]) -> tuple[int, bool]:
    """The most trainings at one time, and whether no GPU was in two of them."""
    sets = [
        [gpu for gpus, _, _, start, end in seen if start <= began < end for gpu in gpus] for _, _, _, began, _ in seen
    ]
    most = max((sum(start <= began < end for _, _, _, start, end in seen) for _, _, _, began, _ in seen), default=0)
    return most, all(len(gpus) == len(set(gpus)) for gpus in sets)


def several(out: Path, wrong: list[str]) -> None:
    """One cell a GPU and two GPUs a cell, as the trainings saw it themselves."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if count < 2 or "MIG-" in listed:
        say(f"     left out: cells on several GPUs at once ({count} here)")
        return
    one = waits(out / "one-each", sys.executable, width=1, cells=", ".join(str(n / 2) for n in range(2 * count)))
    code, _ = run(out / "one-run", matrix=one)
    seen = seen_in(out / "one-run")
    most, apart = together(seen)
    expect(wrong, code == 0 and len(seen) == 2 * count, f"{len(seen)} cells on {count} GPUs, exit code {code}")
    expect(wrong, apart and all(n == 1 for _, n, *_ in seen), "each cell had one GPU for itself")
    expect(wrong, 2 <= most <= count, f"at most {most} at once")
    launcher = f'{sys.executable}, -m, torch.distributed.run, --nproc_per_node, "{{gpus}}"'
    two = waits(out / "two-each", launcher, width=2, cells=", ".join(str(8 + n) for n in range(max(2, count // 2))))
    code, _ = run(out / "two-run", matrix=two)
    seen = seen_in(out / "two-run")
    most, apart = together(seen)
    expect(wrong, code == 0 and apart and all(n == 2 for _, n, *_ in seen), f"two GPUs a cell, exit code {code}")
    expect(wrong, most == min(count // 2, len(seen)), f"{most} such cells at once")
    expect(wrong, len({port for _, _, port, *_ in seen}) == len(seen), "each with a port of its own")


@contextmanager
def holder(share: float, seconds: float) -> Iterator[None]:
    """Somebody else's process, which holds a share of the first GPU's memory for a while."""
    command = [sys.executable, "-c", HOLDER, str(share), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is not None:
                process.stdout.readline()
            yield
        finally:
            process.kill()


def taken(out: Path, wrong: list[str]) -> None:
    """A GPU that somebody has is waited for (or another taken), named, and used when it is free."""
    from nanbisect.gpus import GpuMemory

    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
    with holder(0.6, 60):
        gpu = GpuMemory(os.environ)([first]).get(first)
        expect(wrong, gpu is not None, f"nvidia-smi tells what is free on {first}: {gpu}")
        if gpu is None:
            return
        expect(wrong, gpu.free < 0.45 * gpu.total, f"{gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB are free")
        code, _ = run(
            out / "taken", "--gpus", first, matrix=waits(out / "taken-matrix", sys.executable, width=1, cells="0, 1")
        )
    said = (out / "taken.txt").read_text()
    expect(wrong, code == 0, f"a run begun on a taken GPU ends well, exit code {code}")
    expect(wrong, "is left to whoever has it" in said, "it said who has the GPU")


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
    for part in (doctor, demo, starts, kernels, slots, several, taken, memory):
        part(out, wrong)
    say("all hold" if not wrong else f"{len(wrong)} do not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
