"""Rows of the Python that trains: itself, torch, and the devices torch computes on. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from nanbisect.environment.row import (
    DTYPES,
    NO_MODULE,
    SELECTOR,
    Facts,
    Row,
    device_of,
    gpu_mend,
    gpu_seen,
    listed,
    numbers,
    pip,
    size,
    working_gpus,
    works,
)
from nanbisect.trainers.installed import OLDEST_TORCH

LITTLE_GPU = 0.5  # a share of its memory


def python_row(facts: Facts) -> Row:
    """The interpreter: one that is too old for the probe did not even start the look."""
    return Row("python", "ok", f"{facts['python']['version']}, {facts['python']['executable']}", essential=True)


def torch_row(facts: Facts) -> Row:
    """Installed, imported, new enough."""
    torch, installed = facts["torch"], facts["python"]["packages"].get("torch")
    if "error" in torch:
        absent = installed is None and "No module named 'torch'" in torch["error"]
        found = "not installed" if absent else f"{installed or 'no version'}, can't be imported: {torch['error']}"
        mend = pip(facts, "torch") if absent else broken_torch(facts, torch["error"])
        return Row("torch", "missing", found, "no cell can run", mend, essential=True)
    if numbers(torch["version"]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        means = f"no cell can be judged: the probe needs torch {oldest}"
        return Row("torch", "missing", torch["version"], means, pip(facts, f"'torch>={oldest}'"), essential=True)
    return Row("torch", "ok", f"{torch['version']}, {build_of(facts)}", essential=True)


def build_of(facts: Facts) -> str:
    """What torch was built for, and the cuDNN it loaded."""
    torch, cudnn = facts["torch"], facts["gpus"].get("cudnn")
    if torch.get("hip"):
        return f"built for ROCm {torch['hip']}"
    if not torch.get("cuda"):
        return "a CPU build"
    return f"built for CUDA {torch['cuda']}" + (f", cuDNN {_cudnn(cudnn)}" if cudnn else "")


def _cudnn(number: int) -> str:
    """91002 is 9.10.2, and 8902 was 8.9.2."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def broken_torch(facts: Facts, error: str) -> str:
    """What to do about a torch that is there and can't be imported."""
    module = NO_MODULE.search(error)
    if module and module[1] != "torch":
        return f"{pip(facts, 'torch')} (it brings what torch needs)"
    if "is no torch" in error or "partially initialized" in error:
        return "rename the file or folder called torch that stands in the way (PYTHONPATH, or beside the script)"
    if "GLIBC" in error or "SIGILL" in error:
        return f"a torch built for an older system or processor: {SELECTOR}"
    if module or ".so" in error or "undefined symbol" in error or "SIGSEGV" in error:
        return f"{pip(facts, '--force-reinstall torch')}; and try with LD_LIBRARY_PATH unset"
    return f"by hand, to see all of it: {shlex.quote(facts['python']['executable'])} -X importtime -c 'import torch'"


# devices ---------------------------------------------------------------------------------------


def device_row(facts: Facts, wanted: str) -> Row:
    """Where cells train, and in which dtypes. `wanted` is the matrix's device: auto, cuda or cpu."""
    device, gpus = device_of(facts, wanted), working_gpus(facts)
    if "error" in facts["torch"]:
        return Row("device", "missing", "not tried without torch", "no cell can run", "the row torch first", True)
    if device == "cuda" and gpus:
        return Row("device", "ok", f"cuda, {len(gpus)} GPU{'s' * (len(gpus) > 1)} to train on", essential=True)
    if device == "cuda":
        mend = "the row gpu first, or --device cpu until then"
        return Row("device", "missing", "cuda, and no GPU computes", "no cell can run there", mend, essential=True)
    if not works(facts["cpu"]):
        why = facts["cpu"].get("error") or next(iter(facts["cpu"].get("dtypes", {}).values()), "it was not tried")
        mend = f"another build of torch: {SELECTOR}"
        return Row("device", "missing", f"cpu, does not compute: {why}", "no cell can run", mend, essential=True)
    return dtype_row("device", "cpu", facts["cpu"]["dtypes"], essential=True)


def dtype_row(name: str, found: str, dtypes: Mapping[str, str | None], *, essential: bool = False) -> Row:
    """A device by what it computes in."""
    can = [dtype for dtype in DTYPES if dtypes.get(dtype, "") is None]
    lacks = [dtype for dtype in DTYPES if dtype not in can]
    if not lacks:
        return Row(name, "ok", f"{found}, computes in {listed(can)}", essential=essential)
    levels = tuple(f"{setting}={dtype}" for dtype in lacks for setting in ("precision", "param_dtype"))
    means = f"{listed(levels)} can't run on it"
    text = f"{found}, computes in {listed(can)}; {lacks[0]}: {dtypes.get(lacks[0], 'not tried')}"
    return Row(name, "warn", text, means, f"precision={can[-1]}, or another torch or device", essential, levels)


def gpu_rows(facts: Facts) -> Iterator[Row]:
    """A row a GPU, or one that says why torch has none."""
    devices = facts["gpus"].get("devices", ())
    if not devices:
        yield no_gpu(facts)
    for device in devices:
        yield gpu_row(f"gpu.{device['index']}" if len(devices) > 1 else "gpu", device, facts)


def no_gpu(facts: Facts) -> Row:
    """None here, or one that torch can't use, and why."""
    nvidia, torch, levels = facts["machine"]["nvidia"], facts["torch"], ("attention=flash",)
    names = listed(sorted({gpu["name"] for gpu in nvidia["gpus"]})) or "a GPU"
    if not gpu_seen(facts):
        said = [error for error in _errors(facts) if "no NVIDIA driver" not in error]
        means = "attention=flash, sdpa:efficient and sdpa:cudnn need one"
        means = means if "error" in torch else f"cells train on the CPU; {means}"
        return Row("gpu", "missing", f"none{f': {said[0]}' if said else ''}", means, gpu_mend(facts), levels=levels)
    if "error" in torch:
        return Row("gpu", "warn", f"{names}, not tried without torch", "", "the row torch first", levels=levels)
    why, mend = unused_gpu(facts)
    means = f"cells train on the CPU, although {names} is here"
    return Row("gpu", "missing", f"{names}, but torch can't use it: {why}", means, mend, levels=levels)


def _errors(facts: Facts) -> list[str]:
    """What CUDA said, and how looking for GPUs ended if it did not end well."""
    gpus = facts["gpus"]
    return [error for error in (*gpus.get("errors", ()), gpus.get("error")) if error]


def unused_gpu(facts: Facts) -> tuple[str, str]:
    """Why torch does not use a GPU that is there, and the mend."""
    torch, gpus = facts["torch"], facts["gpus"]
    said = next(iter(_errors(facts)), "it does not say why")
    too_old = re.search(r"driver.*too old.*\(found version (\d+)\)", said)
    if not (torch.get("cuda") or torch.get("hip")):
        return "it is a CPU build", f"a CUDA build of torch: {SELECTOR}"
    if too_old:
        number = int(too_old[1])
        newest = f"{number // 1000}.{number % 1000 // 10}"
        why = f"the driver knows CUDA {newest} at most, torch was built for {torch['cuda']}"
        return why, f"a newer driver, or a torch built for CUDA {newest} or older ({SELECTOR})"
    if gpus.get("visible") in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {gpus['visible']!r}", "unset CUDA_VISIBLE_DEVICES"
    if gpus.get("visible"):
        return said, f"unset CUDA_VISIBLE_DEVICES (it is {gpus['visible']}), then look at nvidia-smi"
    return said, "look at nvidia-smi; after an update of the driver the machine or container must be started again"


def gpu_row(name: str, gpu: Facts, facts: Facts) -> Row:
    """One GPU: what it is, what is free, what it computes in."""
    about = f"{gpu.get('name', 'unknown')}"
    if "memory" in gpu and "free" in gpu:
        about += f", {size(gpu['memory'])}, {size(gpu['free'])} free"
    if not works(gpu):
        why = gpu.get("error") or next(iter(gpu.get("dtypes", {}).values()), "it was not tried")
        return Row(
            name, "missing", f"{about}, does not compute: {why}", "no cell can run on it", _mend_gpu(why, gpu, facts)
        )
    row = dtype_row(name, about, gpu["dtypes"])
    if row.state == "ok" and not gpu.get("bf16"):
        levels, mend = ("precision=bf16", "param_dtype=bf16"), "precision=fp16, or a GPU from Ampere on"
        return Row(name, "warn", f"{about}, no bf16 of its own", "bf16 is emulated on it", mend, levels=levels)
    if row.state == "ok" and gpu["free"] < LITTLE_GPU * gpu["memory"]:
        means = "somebody uses it: large cells may end as out_of_memory, which is not judged"
        return Row(name, "warn", row.found, means, "nvidia-smi shows who; CUDA_VISIBLE_DEVICES chooses another GPU")
    return row


def _mend_gpu(why: str, gpu: Facts, facts: Facts) -> str:
    if "no kernel image" in why:
        own = "sm_" + "".join(map(str, gpu.get("capability", ())))
        archs = ", ".join(facts["gpus"].get("archs", ()))
        return f"a torch built for {own} (this one is for {archs}): {SELECTOR}"
    if "busy or unavailable" in why or "out of memory" in why:
        return "nvidia-smi shows who uses it; CUDA_VISIBLE_DEVICES chooses another GPU"
    return "look at nvidia-smi; CUDA_VISIBLE_DEVICES chooses another GPU"


def driver_row(facts: Facts) -> Iterator[Row]:
    """The NVIDIA driver, where there is one, or should be."""
    nvidia = facts["machine"]["nvidia"]
    if nvidia["driver"]:
        newest = f", for CUDA up to {nvidia['cuda']}" if nvidia.get("cuda") else ""
        if nvidia["error"]:
            yield Row("driver", "warn", f"{nvidia['driver']}; {nvidia['error']}", "", "look at nvidia-smi")
        else:
            yield Row("driver", "ok", f"{nvidia['driver']}{newest}")
    elif nvidia["error"]:
        yield Row("driver", "missing", nvidia["error"], "torch can't use a GPU without it", "look at nvidia-smi")
