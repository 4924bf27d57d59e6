"""Rows of packages, and of what a machine has beside its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nanbisect.environment.row import GIB, NO_MODULE, Facts, Row, listed, pip, size
from nanbisect.report.words import counted

LITTLE_DISK, LITTLE_MEMORY = 1 * GIB, 2 * GIB
PARTITIONS = 6  # shown
OTHERS = ("trl", "peft", "liger-kernel", "deepspeed", "bitsandbytes", "kernels", "llamafactory", "ms-swift", "axolotl")


def package_row(name: str, facts: Facts, *, own: bool) -> Row:
    """A package that is imported to see whether it can be."""
    version, tried = facts["python"]["packages"].get(name), facts["imports"].get(name, {})
    needs = "the built-in trainer needs it" if own else f"commands that use {name} can't run"
    if version is None:
        return Row(name, "missing", "not installed", needs, pip(facts, name))
    if "error" in facts["torch"]:
        return Row(name, "warn", f"{version}, not tried without torch", "", "the row torch first")
    if "error" not in tried:
        return Row(name, "ok", version)
    mend = f"{pip(facts, name)} (it brings what the package needs)"
    mend = mend if NO_MODULE.search(tried["error"]) else pip(facts, f"--upgrade {name}")
    return Row(name, "missing", f"{version}, can't be imported: {tried['error']}", needs, mend)


def others_row(facts: Facts) -> Iterator[Row]:
    """What else a trainer may use; nothing of it was tried."""
    packages = facts["python"]["packages"]
    there = [f"{name} {packages[name]}" for name in OTHERS if name in packages]
    if there:
        yield Row("others", "ok", f"{', '.join(there)} (installed, not tried)")


def slurm_row(facts: Facts) -> Row:
    """Its commands and partitions."""
    slurm = facts["machine"]["slurm"]
    if not slurm["commands"]:
        mend = "nothing, unless this is a cluster: then module load slurm, or a login node"
        return Row("slurm", "missing", "not on the PATH", "cells run on this machine only", mend)
    inside = f", inside job {slurm['job']}" if slurm["job"] else ""
    if slurm["error"]:
        mend = "sinfo by hand; the controller may be down"
        return Row("slurm", "warn", f"{slurm['error']}{inside}", "jobs can't be started now", mend)
    shown = [_partition(part) for part in slurm["partitions"]]
    more = f" and {len(shown) - PARTITIONS} more" if len(shown) > PARTITIONS else ""
    found = f"{listed(slurm['commands'])}{inside}; partitions {', '.join(shown[:PARTITIONS])}{more}"
    if "srun" not in slurm["commands"] or not any(part["up"] for part in slurm["partitions"]):
        return Row("slurm", "warn", found, "jobs can't be started from here", "a login node, or module load slurm")
    return Row("slurm", "ok", found)


def _partition(part: Facts) -> str:
    inside = [
        counted(part["nodes"], "node"),
        *([part["gpus"]] if part["gpus"] else []),
        *([] if part["up"] else ["down"]),
    ]
    return f"{part['name']} ({', '.join(inside)})"


def disk_rows(facts: Facts) -> Iterator[Row]:
    """Room where run folders go, and for temporary files."""
    mends = {"runs": "--out with a folder on another disk", "tmp": "set TMPDIR to a folder on another disk"}
    for name, mend in mends.items():
        disk = facts["machine"]["disk"][name]
        if disk["error"]:
            means = "no run can be kept there" if name == "runs" else "trainings that write there fail"
            yield Row(f"disk.{name}", "missing", f"{disk['path']}: {disk['error']}", means, mend)
        elif disk["free"] < LITTLE_DISK:
            means = "a run may end half-way, with its cells not judged"
            yield Row(f"disk.{name}", "warn", f"{size(disk['free'])} free for {disk['path']}", means, mend)
        else:
            yield Row(f"disk.{name}", "ok", f"{size(disk['free'])} free for {disk['path']}")


def memory_row(facts: Facts) -> Row:
    """Of the machine, or of the container or job that this is."""
    memory = facts["machine"]["memory"]
    limit = f", {size(memory['limit'])} of it allowed here" if memory["limit"] else ""
    found = f"{size(memory['total'])}{limit}, {size(memory['free'])} free"
    if min(memory["free"], memory["limit"] or memory["free"]) < LITTLE_MEMORY:
        means = "cells may be killed for want of memory, which is not judged"
        return Row("memory", "warn", found, means, "end other programs, or ask for a larger job")
    return Row("memory", "ok", found)


def cores_row(facts: Facts) -> Row:
    """Those of the machine, and those that may be used."""
    there, usable = facts["machine"]["cores"]["there"], facts["machine"]["cores"]["usable"]
    return Row("cores", "ok", f"{there}" if usable == there else f"{usable} usable of {there}")
