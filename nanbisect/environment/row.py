"""A row of the doctor's answer, and the words that several rows need. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Facts = Mapping[str, Any]
State = Literal["ok", "warn", "missing"]

GIB = 1 << 30
DTYPES = ("bf16", "fp16", "fp32")
SELECTOR = "the selector on pytorch.org prints the line"
NO_MODULE = re.compile(r"No module named '(\w+)")


@dataclass(frozen=True)
class Row:
    """One thing that a training needs or may use. `levels` (`attention=flash`) are those that it decides."""

    name: str
    state: State
    found: str
    means: str = ""
    mend: str = ""
    essential: bool = False
    levels: tuple[str, ...] = ()


def device_of(facts: Facts, wanted: str = "auto") -> str:
    """Where cells train, as the trainers choose it: on a GPU if torch sees one, unless a device was asked for."""
    return wanted if wanted != "auto" else "cuda" if facts["gpus"].get("devices") else "cpu"


def working_gpus(facts: Facts) -> list[Facts]:
    """The GPUs on which at least one dtype computed."""
    return [gpu for gpu in facts["gpus"].get("devices", ()) if works(gpu)]


def works(device: Facts) -> bool:
    """Whether anything computed."""
    return any(error is None for error in device.get("dtypes", {}).values())


def pip(facts: Facts, arguments: str) -> str:
    """The command that installs something into the Python that was looked at."""
    return f"{shlex.quote(str(facts['python'].get('executable', 'python')))} -m pip install {arguments}"


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def size(count: int) -> str:
    """`139 GiB`, `0.4 GiB`."""
    return f"{count / GIB:.0f} GiB" if count >= 10 * GIB else f"{count / GIB:.1f} GiB"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def gpu_seen(facts: Facts) -> bool:
    """Whether there is a GPU as far as the driver or the device files show, whatever torch says."""
    return bool(facts["machine"]["nvidia"]["gpus"] or facts["machine"]["nvidia"]["device"])


def gpu_mend(facts: Facts) -> str:
    """What to do about what wants a GPU, where no GPU works."""
    if facts["gpus"].get("devices") or gpu_seen(facts):
        return "the row gpu first"
    return "the row driver first" if facts["machine"]["nvidia"]["error"] else elsewhere(facts)


def elsewhere(facts: Facts) -> str:
    """Where a GPU may be had."""
    slurm = facts["machine"]["slurm"]
    if "srun" not in slurm["commands"]:
        return "a machine with an NVIDIA GPU; a container must be started with its GPUs"
    having = next((part for part in slurm["partitions"] if part["gpus"] and part["up"]), None)
    chosen = f" --partition={having['name']}" if having and not having["default"] else ""
    return f"srun{chosen} --gres=gpu:1 nanbisect doctor"
