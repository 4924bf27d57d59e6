"""What this machine has, as far as it shows without torch: driver, Slurm, disk, memory, cores.

Other programs are asked with a deadline: a driver that hangs must not hang the one who looks for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

PATIENCE = 20.0  # seconds for nvidia-smi or sinfo
NVIDIA = ("name", "memory.total", "memory.used", "driver_version")
SINFO = ("sinfo", "--noheader", "--format", "%P|%a|%D|%G")
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
DEVICES = (Path("/dev/nvidia0"), Path("/dev/kfd"))
CGROUPS = Path("/sys/fs/cgroup")

Facts = dict[str, Any]


def machine(environ: Mapping[str, str], runs: Path) -> Facts:
    """Everything here; `runs` is where run folders go."""
    return {
        "nvidia": nvidia(environ),
        "slurm": slurm(environ),
        "disk": {"runs": disk(runs), "tmp": disk(Path(tempfile.gettempdir()))},
        "memory": memory(),
        "cores": cores(),
    }


def nvidia(environ: Mapping[str, str]) -> Facts:
    """The driver and its GPUs by nvidia-smi; `device` is whether a device file of any GPU is there."""
    facts: Facts = {"device": any(path.exists() for path in DEVICES), "driver": _kernel_module(), "gpus": []}
    query = ("nvidia-smi", f"--query-gpu={','.join(NVIDIA)}", "--format=csv,noheader,nounits")
    out, facts["error"] = asked(query, environ)
    for line in out.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(NVIDIA):
            facts["gpus"].append({"name": parts[0], "memory": _mebibytes(parts[1]), "used": _mebibytes(parts[2])})
            facts["driver"] = parts[3]
    if facts["gpus"]:
        told = re.search(r"CUDA Version:\s*([\d.]+)", asked(("nvidia-smi",), environ)[0])
        facts["cuda"] = told[1] if told else None
    return facts


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdecimal() else None


def _kernel_module() -> str | None:
    """The version of the driver that is loaded, where there is no nvidia-smi, as in some containers."""
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module\S*(?:\s+for \S+)?\s+([\d.]+)", KERNEL_MODULE.read_text(encoding="utf-8"))
        return found[1] if found else None
    return None


def slurm(environ: Mapping[str, str]) -> Facts:
    """Which of its commands are on the PATH, and the partitions that sinfo names."""
    found = [name for name in ("sinfo", "srun", "sbatch") if shutil.which(name, path=environ.get("PATH"))]
    facts: Facts = {"commands": found, "job": environ.get("SLURM_JOB_ID"), "partitions": [], "error": None}
    if "sinfo" in found:
        out, facts["error"] = asked(SINFO, environ)
        facts["partitions"] = partitions(out)
    return facts


def partitions(text: str) -> list[Facts]:
    """`sinfo`'s lines, one a partition: its GPUs as Slurm writes them (`gpu:h100:8`), "" for none."""
    found: dict[str, Facts] = {}
    for parts in (line.strip().split("|") for line in text.splitlines()):
        if len(parts) != 4:
            continue
        name, state, nodes, gres = parts
        entry = found.setdefault(name.rstrip("*"), {"default": name.endswith("*"), "up": False, "nodes": 0, "gpus": ""})
        entry["up"] |= state == "up"
        entry["nodes"] += int(nodes) if nodes.isdecimal() else 0
        entry["gpus"] = entry["gpus"] or ",".join(re.findall(r"gpu[:\w.-]*", gres))
    return [{"name": name, **entry} for name, entry in found.items()]


def disk(folder: Path) -> Facts:
    """Free bytes where a folder is or would be made, and whether a file can be written there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        free, error = shutil.disk_usage(there).free, None
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as problem:
        free, error = None, problem.strerror or str(problem)
    return {"path": str(folder), "free": free, "error": error}


def memory() -> Facts:
    """Bytes of memory, and how many are free; `limit` where a control group (a container, a job) allows less."""
    host = psutil.virtual_memory()
    limits = [int(text) for text in _control_group("memory", "memory.max", "memory.limit_in_bytes") if text.isdecimal()]
    limit = min(limits, default=host.total)
    return {"total": host.total, "free": host.available, "limit": limit if limit < host.total else None}


def cores() -> Facts:
    """Cores of the machine and those that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for text in _control_group("cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            usable = min(usable, max(1, -(-int(quota) // int(period))))
    return {"there": os.cpu_count() or 1, "usable": usable}


def _control_group(controller: str, *files: str) -> list[str]:
    """What these files say in the control groups of this process, its own and those around it; of version 1 and 2."""
    texts = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            folder = Path(path.lstrip("/"))
            for file in (
                CGROUPS / (controller if names else "") / part / f for part in (folder, *folder.parents) for f in files
            ):
                with contextlib.suppress(OSError):
                    texts.append(file.read_text(encoding="utf-8").strip())
    return texts


def asked(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str | None]:
    """What a program printed, and why that is not all; ("", None) for one that is not installed."""
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        return "", None
    try:
        process = subprocess.Popen(
            (program, *command[1:]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(environ),
        )
    except OSError as error:
        return "", f"{command[0]} can't be started: {error.strerror}"
    try:
        out, problems = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()  # and no waiting: a process that is stuck in the driver can't be killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return "", f"{command[0]} did not end within {PATIENCE:g} s"
    if process.returncode:
        lines = [line.strip() for line in (problems + out).splitlines() if line.strip()]
        return out, f"{command[0]}: {lines[0] if lines else f'exit code {process.returncode}'}"
    return out, None
