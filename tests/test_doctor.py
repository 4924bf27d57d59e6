"""The doctor: facts -> rows with their mends, a matrix's levels, broken installs, and the document."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nanbisect.app import load, show_checkup
from nanbisect.environment import machine as machines
from nanbisect.environment.checkup import Checkup, examine_matrix
from nanbisect.environment.facts import LOOK, facts_of, folded, interpreter
from nanbisect.environment.levels import levels_of
from nanbisect.environment.row import Row
from nanbisect.environment.rows import rows_of
from nanbisect.errors import UsageError
from nanbisect.executors.base import Exit
from nanbisect.executors.local import LocalExecutor
from nanbisect.machine import Looked, Occasion
from nanbisect.matrix import Factor, Matrix
from nanbisect.matrix_file import NO_OVERRIDES
from nanbisect.trainers.registry import TRAINERS
from tests.commands import ROOT, nanbisect

PYTHON = "/venv/bin/python"
GIB = 1 << 30
FINE = {"bf16": None, "fp16": None, "fp32": None}
NO_KERNEL = "RuntimeError: No viable backend for scaled_dot_product_attention was found."
HALVES = "Expected query, key and value to all be of dtype: {Half, BFloat16}."


def trials(**errors: str) -> list[dict[str, Any]]:
    """Six trials; `fp32="..."` fails in that dtype, `mask="..."` with a mask, `every="..."` always."""
    every = errors.get("every")
    return [
        {"dtype": dtype, "mask": mask, "node": "X", "error": every or errors.get(dtype) or with_mask}
        for dtype in FINE
        for mask, with_mask in ((False, None), (True, errors.get("mask")))
    ]


def kernel(name: str, device: str = "cpu", **errors: str) -> dict[str, Any]:
    """What `look.py` says of one kernel."""
    return {"kernel": name, "device": device, "trials": trials(**errors)}


def on_cpu() -> dict[str, Any]:
    """A laptop, in the form in which `look.py` and `machine.py` tell it (a test below compares it with a real look)."""
    disk = {"path": "reports", "free": 80 * GIB, "error": None}
    return {
        "python": {
            "executable": PYTHON,
            "version": "3.11.7",
            "packages": {"torch": "2.13.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0"},
        },
        "torch": {"version": "2.13.0+cpu", "cuda": None, "hip": None, "seconds": 1.0},
        "cpu": {"dtypes": dict(FINE)},
        "gpus": {"visible": None, "errors": [], "cudnn": None, "archs": [], "devices": []},
        "kernels": [
            *(kernel(name) for name in ("math", "flash")),
            *(kernel(name, every=NO_KERNEL) for name in ("efficient", "cudnn")),
        ],
        "flash": [],
        "imports": {"transformers": {"seconds": 1.0}, "accelerate": {"seconds": 1.0}},
        "machine": {
            "nvidia": {"device": False, "driver": None, "gpus": [], "error": None},
            "slurm": {"commands": [], "job": None, "partitions": [], "error": None},
            "disk": {"runs": disk, "tmp": {**disk, "path": "/tmp"}},
            "memory": {"total": 24 * GIB, "free": 20 * GIB, "limit": None},
            "cores": {"there": 2, "usable": 2},
        },
    }


def gpu(index: int = 0, **changed: Any) -> dict[str, Any]:
    """A GPU at rest."""
    plain = {"index": index, "name": "NVIDIA H200", "capability": [9, 0], "memory": 140 * GIB, "free": 139 * GIB}
    return {**plain, "bf16": True, "dtypes": dict(FINE), **changed}


def on_gpu(*devices: dict[str, Any]) -> dict[str, Any]:
    """A server where all is well. Nobody recorded it on one: its texts are those of torch's sources."""
    facts = on_cpu()
    facts["python"]["packages"] |= {"torch": "2.9.0+cu128", "flash-attn": "2.8.3", "trl": "0.25.0"}
    facts["torch"] |= {"version": "2.9.0+cu128", "cuda": "12.8"}
    facts["gpus"] |= {"cudnn": 91002, "archs": ["sm_80", "sm_90"], "devices": list(devices or (gpu(),))}
    facts["kernels"] = [
        kernel("math", "cuda:0"),
        kernel("flash", "cuda:0", fp32=HALVES, mask="Flash Attention does not support non-null attn_mask."),
        kernel("efficient", "cuda:0"),
        kernel("cudnn", "cuda:0", fp32=HALVES),
    ]
    facts["flash"] = [{"package": "flash_attn", "device": "cuda:0", "dtypes": {"bf16": None, "fp16": None}}]
    facts["machine"]["nvidia"] |= {"device": True, "driver": "570.86.15", "cuda": "12.8"}
    facts["machine"]["nvidia"]["gpus"] = [{"name": "NVIDIA H200", "memory": 140 * GIB, "used": 0}]
    return facts


def unused(*errors: str, **torch: Any) -> dict[str, Any]:
    """A server whose torch finds no GPU."""
    facts = on_gpu()
    facts["torch"] |= torch
    facts["gpus"] = {"visible": None, "errors": list(errors), "cudnn": None, "archs": [], "devices": []}
    facts["kernels"], facts["flash"] = on_cpu()["kernels"], [{"package": "flash_attn", "device": "cpu", "dtypes": {}}]
    return facts


def without_torch(error: str, *, installed: bool = True) -> dict[str, Any]:
    """No torch, or one that can't be imported."""
    facts = copy.deepcopy(on_cpu())
    facts["torch"], facts["cpu"], facts["gpus"], facts["kernels"] = {"error": error}, {}, {}, []
    if not installed:
        facts["python"]["packages"] = {}
        facts["imports"] = {}
    return facts


def rows(facts: Mapping[str, Any], device: str = "auto") -> dict[str, Row]:
    """Rows by name."""
    return {row.name: row for row in rows_of(facts, device=device)}


# rows ------------------------------------------------------------------------------------------


def test_a_laptop_trains_on_its_cpu_and_knows_what_it_lacks() -> None:
    """A missing thing is no failure, but says which levels it takes away and what would bring it."""
    found = rows(on_cpu())
    assert [name for name, row in found.items() if row.state == "ok"] == [
        "python", "torch", "device", "sdpa.math", "sdpa.flash", "transformers", "accelerate", "disk.runs", "disk.tmp",
        "memory", "cores",
    ]  # fmt: skip
    assert found["device"].found == "cpu, computes in bf16, fp16 and fp32"
    assert found["sdpa.flash"].found == "runs in bf16, fp16 and fp32, with and without a mask"
    for name in ("gpu", "sdpa.efficient", "sdpa.cudnn", "flash-attn"):
        assert found[name].state == "missing"
        assert "NVIDIA GPU" in found[name].mend
    assert found["sdpa.cudnn"].means == "attention=sdpa:cudnn cells can't run here"
    assert found["flash-attn"].levels == ("attention=flash",)


def test_a_server_at_rest_has_nothing_to_mend_but_the_limits_of_its_kernels() -> None:
    """Which are facts, not faults: flash takes no mask, and neither it nor cuDNN computes in fp32."""
    found = rows(on_gpu(gpu(0), gpu(1)))
    assert [name for name, row in found.items() if row.state != "ok"] == ["sdpa.flash", "sdpa.cudnn", "slurm"]
    assert found["torch"].found == "2.9.0+cu128, built for CUDA 12.8, cuDNN 9.10.2"
    assert found["device"].found == "cuda, 2 GPUs to train on"
    assert found["gpu.1"].found == "NVIDIA H200, 140 GiB, 139 GiB free, computes in bf16, fp16 and fp32"
    assert found["driver"].found == "570.86.15, for CUDA up to 12.8"
    assert found["sdpa.flash"].found == "runs in bf16 and fp16 without a mask only; not in fp32"
    assert found["sdpa.flash"].means == (
        "attention=sdpa:flash can't run batches with padding, nor cells that attend in fp32"
    )
    assert found["sdpa.cudnn"].found == "runs in bf16 and fp16, with and without a mask; not in fp32"
    assert found["flash-attn"].found == "2.8.3, runs in bf16 and fp16"
    assert found["others"].found == "trl 0.25.0 (installed, not tried)"


OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020). Please update"
NO_IMAGE = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (unused(OLD), ("knows CUDA 12.2 at most, torch was built for 12.8", "a torch built for CUDA 12.2 or older")),
        (unused(cuda=None), ("it is a CPU build", "a CUDA build of torch", "although NVIDIA H200 is here")),
        (unused("RuntimeError: No CUDA GPUs are available"), ("No CUDA GPUs are available", "nvidia-smi")),
        (on_gpu(gpu(dtypes=dict.fromkeys(FINE, NO_IMAGE))), ("no kernel image", "built for sm_90", "sm_80, sm_90")),
        (on_gpu(gpu(bf16=False)), ("no bf16 of its own", "emulated", "precision=fp16")),
        (on_gpu(gpu(free=20 * GIB)), ("20 GiB free", "out_of_memory", "CUDA_VISIBLE_DEVICES")),
        (on_gpu(gpu(dtypes={**FINE, "bf16": "RuntimeError: no"})), ("bf16: RuntimeError: no", "precision=bf16 and")),
        (on_gpu({"index": 0, "error": "RuntimeError: busy or unavailable"}), ("does not compute", "nvidia-smi")),
    ],
    ids=["old driver", "CPU build", "none", "no kernels", "no bf16", "in use", "one dtype", "busy"],
)  # fmt: skip
def test_a_gpu_that_can_not_be_used_says_why_and_what_to_do(facts: dict[str, Any], words: tuple[str, ...]) -> None:
    """Each way in which CUDA fails has its own mend."""
    row = rows(facts)["gpu"]
    assert row.state != "ok"
    for word in words:
        assert word in f"{row.found} | {row.means} | {row.mend}"


def test_a_hidden_gpu_is_not_a_missing_one() -> None:
    """CUDA_VISIBLE_DEVICES."""
    facts = unused("RuntimeError: No CUDA GPUs are available")
    facts["gpus"]["visible"] = ""
    assert rows(facts)["gpu"].mend == "unset CUDA_VISIBLE_DEVICES"
    facts["gpus"]["visible"] = "7"
    assert "(it is 7)" in rows(facts)["gpu"].mend


def test_cells_train_where_the_trainers_put_them() -> None:
    """With a GPU that torch sees and that computes nothing, `auto` fails; --device cpu works."""
    broken = on_gpu(gpu(dtypes=dict.fromkeys(FINE, NO_IMAGE)))
    assert rows(broken)["device"].state == "missing"
    assert rows(broken, "cpu")["device"].state == "ok"
    assert rows(on_cpu(), "cuda")["device"].state == "missing"
    nothing = on_cpu()
    nothing["cpu"] = {"error": "crashed: SIGILL"}
    assert rows(nothing)["device"].found == "cpu, does not compute: crashed: SIGILL"


def test_a_dtype_that_does_not_compute_takes_its_levels() -> None:
    """An old torch had no fp16 on a CPU."""
    facts = on_cpu()
    facts["cpu"]["dtypes"]["fp16"] = "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'"
    row = rows(facts)["device"]
    assert (row.state, row.levels) == ("warn", ("precision=fp16", "param_dtype=fp16"))
    assert "computes in bf16 and fp32; fp16: RuntimeError" in row.found


def test_a_kernel_that_gives_nan_or_stops_half_way_is_told() -> None:
    """The first is the finding that people look for; what was not tried is not claimed."""
    facts = on_gpu()
    facts["kernels"][3] = kernel("cudnn", "cuda:0", bf16="ArithmeticError: NaN or Inf on ordinary numbers", fp32=HALVES)
    facts["kernels"][2]["trials"] = [*trials(mask="CUDA error: an illegal memory access was encountered")[:2]]
    found = rows(facts)
    assert found["sdpa.cudnn"].found == "gives NaN or Inf in bf16 on cuda"
    assert "brings a NaN by itself" in found["sdpa.cudnn"].means
    assert found["sdpa.efficient"].found == (
        "runs in bf16 without a mask only; the rest was not tried: the last trial left the device broken"
    )
    facts["kernels"][1] = {"kernel": "flash", "device": "cuda:0", "error": "did not end within 120 s"}
    assert rows(facts)["sdpa.flash"].found == "does not run on cuda: did not end within 120 s"
    assert rows(facts)["sdpa.flash"].state == "missing"


def test_a_torch_that_can_not_be_told_which_kernel_to_use() -> None:
    """Before 2.3."""
    facts = on_cpu()
    facts["kernels"][0] = kernel("math", every="ModuleNotFoundError: No module named 'torch.nn.attention'")
    row = rows(facts)["sdpa.math"]
    assert (row.state, row.means) == ("missing", "attention=sdpa:math cells can't run here")
    assert "'torch>=2.3'" in row.mend


def test_several_kinds_of_gpu_have_kernels_of_their_own() -> None:
    """By the number of the GPU they were tried on."""
    facts = on_gpu(gpu(0), gpu(1, name="Tesla V100", capability=[7, 0], bf16=False))
    facts["kernels"] += [kernel("flash", "cuda:1", every="Flash attention only supports gpu architectures from sm80")]
    found = rows(facts)
    assert found["sdpa.flash.0"].state == "warn"
    assert found["sdpa.flash.1"].state == "missing"
    assert found["gpu.1"].state == "warn"


@pytest.mark.parametrize(
    ("version", "tried", "words"),
    [
        (None, None, ("not installed", f"{PYTHON} -m pip install --no-build-isolation flash-attn")),
        ("2.8.3", {"error": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10"},
         ("does not run", "built for another torch", "--force-reinstall flash-attn")),
        ("2.8.3", {"dtypes": dict.fromkeys(("bf16", "fp16"), "RuntimeError: FlashAttention only supports Ampere GPUs")},
         ("only supports Ampere", "a GPU from Ampere on")),
        ("2.8.3", {"error": "ModuleNotFoundError: No module named 'einops'"}, ("einops", "brings what the package")),
        ("2.8.3", {"error": "crashed: SIGSEGV"}, ("crashed: SIGSEGV", "another version of flash-attn")),
    ],
    ids=["absent", "other torch", "old GPU", "dependency", "crash"],
)  # fmt: skip
def test_flash_attention_is_run_and_not_only_found(version: str | None, tried: Any, words: tuple[str, ...]) -> None:
    """Installed is not enough."""
    facts = on_gpu()
    facts["flash"] = [{"package": "flash_attn", "device": "cuda:0", **tried}] if tried else []
    facts["python"]["packages"] |= {"flash-attn": version} if version else {}
    if version is None:
        del facts["python"]["packages"]["flash-attn"]
    row = rows(facts)["flash-attn"]
    assert row.state == "missing"
    assert row.means == "attention=flash cells can't run here"
    for word in words:
        assert word in f"{row.found} | {row.mend}"


def test_flash_attention_is_not_advised_where_it_can_not_run() -> None:
    """An older GPU, or none that works."""
    facts = on_gpu(gpu(name="Tesla V100", capability=[7, 0]))
    facts["flash"] = []
    del facts["python"]["packages"]["flash-attn"]
    assert rows(facts)["flash-attn"].mend.startswith("a GPU from Ampere on")
    facts = unused(cuda=None)
    assert rows(facts)["flash-attn"].found == "2.8.3, and no GPU to run on"
    assert rows(facts)["flash-attn"].mend == "the row gpu first"


@pytest.mark.parametrize(
    ("error", "installed", "mend"),
    [
        ("ModuleNotFoundError: No module named 'torch'", False, f"{PYTHON} -m pip install torch"),
        ("ModuleNotFoundError: No module named 'typing_extensions'", True, "it brings what torch needs"),
        ("ModuleNotFoundError: No module named 'torch._C'", True, "--force-reinstall torch"),
        ("ImportError: libcudnn.so.9: cannot open shared object file", True, "--force-reinstall torch"),
        ("OSError: /lib/libc.so.6: version `GLIBC_2.28' not found", True, "an older system or processor"),
        ("the import crashed: SIGILL", True, "an older system or processor"),
        ("ImportError: /here/torch.py is no torch", True, "rename the file"),
        ("the import did not end within 120 s", True, f"{PYTHON} -X importtime -c 'import torch'"),
    ],
)
def test_a_torch_that_can_not_be_imported_says_what_to_do(error: str, installed: bool, mend: str) -> None:
    """And everything that hangs on it says so, instead of failing for reasons of its own."""
    found = rows(without_torch(error, installed=installed))
    assert found["torch"].state == "missing"
    assert mend in found["torch"].mend
    assert found["device"].mend == "the row torch first"
    assert not any(name.startswith("sdpa") for name in found)
    assert "cells train on the CPU" not in found["gpu"].means


def test_a_torch_too_old_is_missing() -> None:
    """The probe's limit."""
    facts = on_cpu()
    facts["torch"]["version"] = "2.0.1"
    row = rows(facts)["torch"]
    assert (row.state, row.essential) == ("missing", True)
    assert "'torch>=2.1'" in row.mend


def test_a_package_must_be_imported_to_count() -> None:
    """A version alone says little."""
    facts = on_cpu()
    facts["imports"]["accelerate"] = {"error": "ModuleNotFoundError: No module named 'yaml'"}
    facts["imports"]["transformers"] = {"error": "ImportError: tokenizers>=0.22 is required"}
    del facts["machine"]["cores"]
    facts["machine"]["cores"] = {"there": 64, "usable": 4}
    found = rows(facts)
    assert found["accelerate"].mend == f"{PYTHON} -m pip install accelerate (it brings what the package needs)"
    assert found["transformers"].mend == f"{PYTHON} -m pip install --upgrade transformers"
    assert found["transformers"].means == "the built-in trainer needs it"
    assert found["cores"].found == "4 usable of 64"
    other = {row.name: row for row in rows_of(facts, own=False)}
    assert other["transformers"].means == "commands that use transformers can't run"


def test_disk_and_memory_that_run_out_are_told_before_a_run() -> None:
    """A container's limit counts, not the machine's memory."""
    facts = on_cpu()
    facts["machine"]["disk"]["runs"] |= {"free": GIB // 2}
    facts["machine"]["disk"]["tmp"] |= {"free": None, "error": "Read-only file system"}
    facts["machine"]["memory"]["limit"] = GIB
    found = rows(facts)
    assert (found["disk.runs"].state, found["disk.tmp"].state, found["memory"].state) == ("warn", "missing", "warn")
    assert found["disk.runs"].found == "0.5 GiB free for reports"
    assert "TMPDIR" in found["disk.tmp"].mend
    assert "1.0 GiB of it allowed here" in found["memory"].found


def test_a_login_node_says_where_the_gpus_are() -> None:
    """The command that gets one, with the partition that has them."""
    facts = on_cpu()
    parts = machines.partitions(
        "cpu*|up|10|(null)\nh100|up|4|gpu:h100:8(S:0-1)\nold|down|1|gpu:2\nh100|up|2|gpu:h100:8\n"
    )
    assert [(part["name"], part["nodes"], part["gpus"], part["up"]) for part in parts] == [
        ("cpu", 10, "", True), ("h100", 6, "gpu:h100:8", True), ("old", 1, "gpu:2", False),
    ]  # fmt: skip
    facts["machine"]["slurm"] = {"commands": ["sinfo", "srun"], "job": None, "partitions": parts, "error": None}
    found = rows(facts)
    assert found["gpu"].mend == "srun --partition=h100 --gres=gpu:1 nanbisect doctor"
    assert found["slurm"].found == (
        "sinfo and srun; partitions cpu (10 nodes), h100 (6 nodes, gpu:h100:8), old (1 node, gpu:2, down)"
    )
    facts["machine"]["slurm"] |= {"error": "sinfo: slurm_load_partitions: Unable to contact slurm controller"}
    assert rows(facts)["slurm"].state == "warn"


# the machine -----------------------------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> None:
    """An executable of that name."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_driver_and_slurm_are_asked_by_their_own_programs(tmp_path: Path) -> None:
    """With what they print, and with what they say when they fail."""
    smi = 'case "$1" in --query*) echo "NVIDIA H200, 143771, 10, 570.86.15";; *) echo "| CUDA Version: 12.8 |";; esac'
    program(tmp_path, "nvidia-smi", smi)
    program(tmp_path, "sinfo", 'echo "gpu*|up|2|gpu:8"')
    environ = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    nvidia, slurm = machines.nvidia(environ), machines.slurm(environ)
    assert (nvidia["driver"], nvidia["cuda"], nvidia["error"]) == ("570.86.15", "12.8", None)
    assert nvidia["gpus"] == [{"name": "NVIDIA H200", "memory": 143771 << 20, "used": 10 << 20}]
    assert [part["name"] for part in slurm["partitions"]] == ["gpu"]
    program(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert machines.nvidia(environ)["error"] == "nvidia-smi: NVIDIA-SMI has failed"
    assert machines.nvidia({"PATH": str(tmp_path / "none")})["error"] is None


def test_a_driver_that_hangs_does_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left alone after a while."""
    program(tmp_path, "nvidia-smi", "exec sleep 60")
    monkeypatch.setattr(machines, "PATIENCE", 0.2)
    facts = on_cpu()
    facts["machine"]["nvidia"] = machines.nvidia({"PATH": f"{tmp_path}:/bin:/usr/bin"})
    row = rows(facts)["driver"]
    assert (row.state, row.found) == ("missing", "nvidia-smi did not end within 0.2 s")


def test_a_folder_that_is_not_there_yet_has_room_where_it_would_be_made(tmp_path: Path) -> None:
    """As run folders have."""
    facts = machines.disk(tmp_path / "reports" / "deep")
    assert facts["free"] > 0
    assert facts["error"] is None
    assert not (tmp_path / "reports").exists()


# broken installs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    """Starts processes of this machine."""
    local = LocalExecutor()
    yield local
    local.close()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('libcudnn.so.9: cannot open shared object file')\n", "ImportError: libcudnn.so.9"),
        ("import time\ntime.sleep(60)\n", "the import did not end within 1 s"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "the import crashed: SIGSEGV"),
        ("import os\nos._exit(3)\n", "the import ended the process with code 3"),
        ("raise SystemExit('no')\n", "SystemExit: no"),
        ("", "is no torch"),
    ],
    ids=["error", "hang", "crash", "end", "exit", "another file"],
)
def test_a_broken_torch_is_a_finding(tmp_path: Path, executor: LocalExecutor, source: str, error: str) -> None:
    """Whatever its import does, the rest of the rows are there."""
    (tmp_path / "torch.py").write_text(source)
    occasion = Occasion(environ={**os.environ, "PYTHONPATH": str(tmp_path)})
    facts = facts_of(sys.executable, executor, occasion, env={}, runs=tmp_path, seconds=1.0)
    assert error in facts["torch"]["error"]
    found = rows(facts)
    assert found["torch"].state == "missing"
    assert found["memory"].found


def test_without_torch_the_answer_is_whole_and_the_exit_code_1(tmp_path: Path) -> None:
    """nanbisect itself imports none, so its own Python may be the broken one."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    done = nanbisect("doctor", "--json", cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    document = json.loads(done.out)
    assert (done.code, document["usable"], document["device"]) == (1, False, None)
    states = {row["name"]: row["state"] for row in document["rows"] if row["essential"]}
    assert states == {"python": "ok", "torch": "missing", "device": "missing"}


def test_a_program_that_is_no_python_is_refused(tmp_path: Path, executor: LocalExecutor) -> None:
    """With its last words; a folder and a name that leads nowhere are refused before anything starts."""
    program(tmp_path, "python", "echo I am a shell script >&2; exit 1")
    with pytest.raises(UsageError, match=r"does not start as a Python.*I am a shell script"):
        facts_of(str(tmp_path / "python"), executor, Occasion(), env={}, runs=tmp_path)
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "python", "")
    with pytest.raises(UsageError, match=f"--python {tmp_path}/bin/python"):
        interpreter(str(tmp_path), os.environ)
    nanbisect("doctor", "--python", "nowhere", cwd=tmp_path).refused("--python nowhere", "no such program", "try:")


# the look, on a machine that pretends ----------------------------------------------------------

PRETEND = """
import contextlib, runpy, sys, types, warnings
import torch
F, cuda = torch.nn.functional, torch.cuda
GPUS = [("NVIDIA H200", 9, 0), ("NVIDIA H200", 9, 0), ("Tesla V100", 7, 0), ("Broken", 3, 5)]
ruined = []
def here(make):
    def made(*sizes, device="cpu", **others):
        if str(device) == "cuda:3" or ruined:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
        return make(*sizes, **others)
    return made
torch.randn, torch.ones = here(torch.randn), here(torch.ones)
torch.version.cuda = "12.8"
cuda.is_available, cuda.device_count = lambda: True, lambda: len(GPUS)
cuda.get_device_properties = lambda i: types.SimpleNamespace(
    name=GPUS[i][0], major=GPUS[i][1], minor=GPUS[i][2], total_memory=1 << 37)
cuda.mem_get_info = lambda i: (1 << 36, 1 << 37)
current = []
@contextlib.contextmanager
def device(index):
    current[:] = [index]
    yield
cuda.device, cuda.set_device = device, lambda index: None
def bf16(including_emulation=True):
    return including_emulation or GPUS[current[0]][1] >= 8
cuda.is_bf16_supported = bf16
cuda.get_arch_list = lambda: ["sm_90"]
attention = F.scaled_dot_product_attention
def sdpa(query, key, value, attn_mask=None, is_causal=False):
    switches = torch.backends.cuda
    if switches.mem_efficient_sdp_enabled() and not switches.math_sdp_enabled():
        ruined.append(True)  # the context of this process, as an illegal access leaves it
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if attn_mask is not None and not switches.math_sdp_enabled():
        for text in (
            "Memory efficient kernel not used because:", "Memory Efficient attention has been runtime disabled.",
            "Flash attention kernel not used because:", "Flash Attention does not support non-null attn_mask.",
            "CuDNN attention kernel not used because:", "CuDNN attention has been runtime disabled.",
        ):
            warnings.warn(text + " (Triggered internally at sdp_utils.cpp:1.)")
        raise RuntimeError("No available kernel. Aborting execution.")
    return attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
F.scaled_dot_product_attention = sdpa
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FLASH_ATTN = """
import torch
def flash_attn_func(query, key, value, causal):
    if query.dtype is torch.float16:
        raise RuntimeError("no fp16 here")
    query, key, value = (item.transpose(1, 2) for item in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)
"""


@pytest.mark.training
def test_the_look_at_gpus_of_several_kinds(tmp_path: Path) -> None:
    """torch's CUDA functions replaced by what they say on four GPUs; the trials themselves run on the CPU."""
    (tmp_path / "pretend.py").write_text(PRETEND)
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(FLASH_ATTN)
    command = [sys.executable, str(tmp_path / "pretend.py"), str(LOOK), str(tmp_path / "lines"), "60"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = tuple(json.loads(line) for line in (tmp_path / "lines").read_text().splitlines())
    facts = {**folded(Looked(lines, Exit("exited", 0), ()), 60.0), "machine": on_gpu()["machine"]}
    assert [entry["device"] for entry in facts["kernels"] if entry["kernel"] == "flash"] == ["cuda:0", "cuda:2"]
    found = rows(facts)
    assert found["gpu.1"].state == "ok"
    assert found["gpu.1"].found.startswith("NVIDIA H200, 128 GiB, 64 GiB free")
    assert found["gpu.2"].found.endswith("no bf16 of its own")
    assert "no kernel image" in found["gpu.3"].found
    assert "sm_35" in found["gpu.3"].mend
    assert found["sdpa.math.0"].state == "ok"
    assert found["sdpa.flash.2"].found == "runs in bf16, fp16 and fp32 without a mask only"
    errors = {t["error"] for e in facts["kernels"] if e["kernel"] == "flash" for t in e["trials"] if t["mask"]}
    assert errors == {"Flash Attention does not support non-null attn_mask."}
    ruined = next(entry for entry in facts["kernels"] if entry["kernel"] == "efficient")
    assert len(ruined["trials"]) == 1
    assert "an illegal memory access" in found["sdpa.efficient.0"].found
    assert "memory access" not in found["sdpa.cudnn.0"].found
    assert found["flash-attn"].found == "unknown, runs in bf16"
    assert found["flash-attn"].state == "warn"
    assert set(facts["gpus"]) == set(on_gpu()["gpus"])
    assert set(facts["gpus"]["devices"][0]) == set(gpu())


# levels ----------------------------------------------------------------------------------------

MATRIX = Matrix(
    "m", "sft", (Factor("attention", ("sdpa", "sdpa:flash", "flash")), Factor("batch_size", ("1", "8"))), {"seed": "1"}
)


def looked(*lines: Mapping[str, Any], how: str = "done", **end: Any) -> Looked:
    """What the trial of the levels left."""
    return Looked((*lines, {"kind": "end", "how": how, **end}), Exit("exited", 0), ("last words",))


def said(kind: str, level: str, setting: str = "attention", **more: str) -> dict[str, str]:
    """A line of that trial."""
    return {"kind": kind, "setting": setting, "level": level, **more}


def test_every_level_of_the_factors_is_told() -> None:
    """Tried or not, and with what the rows say of it."""
    lines = (said("tried", "sdpa"), said("tried", "sdpa:flash"), said("level", "flash", reason="not installed"))
    told = levels_of(MATRIX, looked(*lines), rows_of(on_gpu()))
    assert (told.cells, told.runnable) == (6, 4)
    assert [(item.level, item.runs) for item in told.levels] == [
        ("sdpa", True), ("sdpa:flash", True), ("flash", False), ("1", None), ("8", None),
    ]  # fmt: skip
    why = {item.level: item.why for item in told.levels}
    assert why["flash"] == "not installed"
    assert why["sdpa:flash"].startswith("sdpa.flash: attention=sdpa:flash can't run batches with padding")
    assert (why["sdpa"], why["8"]) == ("", "nothing to try; memory depends on the model")


def test_a_fixed_setting_that_can_not_run_takes_all_cells() -> None:
    """And stands beside the factors."""
    told = levels_of(MATRIX, looked(said("level", "bf16", "precision", reason="no bf16")), ())
    assert told.runnable == 0
    assert (told.levels[-1].setting, told.levels[-1].factor, told.levels[-1].why) == ("precision", False, "no bf16")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "without torch"),
        (looked(how="unsupported", text="device cuda was asked for"), "device cuda was asked for"),
        (Looked((), Exit("exited", 1), ("last words",)), "last words"),
        (Looked((), Exit("exited", 1), ()), "no message"),
    ],
)
def test_levels_that_could_not_be_tried_are_not_claimed(found: Looked | None, words: str) -> None:
    """Nothing is known, and why."""
    told = levels_of(MATRIX, found, ())
    assert (told.runnable, told.levels) == (None, ())
    assert words in told.reason
    assert not Checkup(PYTHON, on_cpu(), rows_of(on_cpu()), "cpu", told).usable


COMMAND = """
trainer: trl
model: m
data: d
{command}
factors: {{liger: [off, on], learning_rate: [1e-5, 2e-5]}}
"""


def test_levels_of_a_command_need_neither_its_model_nor_its_script(tmp_path: Path, executor: LocalExecutor) -> None:
    """Only its Python; and where that is not known, somebody must tell."""
    path = tmp_path / "m.yaml"
    python = f"[{sys.executable}, -m, trl, sft]"
    path.write_text(COMMAND.format(command=f"command: {python}"))
    matrix = load(path, NO_OVERRIDES)
    checkup = examine_matrix(matrix, TRAINERS["trl"], None, executor, _with_no_torch(tmp_path), runs=tmp_path)
    assert checkup.python == sys.executable
    assert checkup.matrix is not None
    assert checkup.matrix.reason == "its levels can't be tried without torch"
    path.write_text(COMMAND.format(command="command: [bash, run.sh, sft]"))
    matrix = load(path, NO_OVERRIDES)
    with pytest.raises(UsageError, match=r"can't be told from here\ntry: --python"):
        examine_matrix(matrix, TRAINERS["trl"], None, executor, Occasion(), runs=tmp_path)
    launch = TRAINERS["trl"].levels(matrix, folder=tmp_path, python=sys.executable)
    assert launch is not None
    done = subprocess.run(launch.argv, check=True)
    lines = [json.loads(line) for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    assert done.returncode == 0
    assert [line["reason"] for line in lines if line["kind"] == "level"] == ["liger=on needs the package liger_kernel"]


def _with_no_torch(folder: Path) -> Occasion:
    (folder / "torch.py").write_text("raise ImportError('none')\n")
    return Occasion(environ={**os.environ, "PYTHONPATH": str(folder)})


def test_another_python_than_that_of_the_cells_is_refused(tmp_path: Path, executor: LocalExecutor) -> None:
    """What it can run says nothing of them."""
    program(tmp_path, "python", "")
    with pytest.raises(UsageError, match=r"train in .*\ntry: leave out --python"):
        examine_matrix(
            load(ROOT / "matrices" / "demo.yaml", NO_OVERRIDES),
            TRAINERS["sft"], str(tmp_path / "python"), executor, Occasion(), runs=tmp_path,
        )  # fmt: skip


def test_packages_of_our_python_do_not_block_levels_of_an_unknown_one(tmp_path: Path) -> None:
    """A command behind a shell script may well have them."""
    (tmp_path / "m.yaml").write_text(COMMAND.format(command="command: [bash, run.sh, sft]"))
    matrix = load(tmp_path / "m.yaml", NO_OVERRIDES)
    launch = TRAINERS["trl"].check(matrix, folder=tmp_path)
    subprocess.run(launch.argv, check=True)
    assert '"kind": "level"' not in (tmp_path / "trainer.jsonl").read_text()


# what is shown ---------------------------------------------------------------------------------


def shown(checkup: Checkup, width: int) -> str:
    """As a terminal of that width shows it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)
    show_checkup(console, checkup)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rows_fit_the_terminal_and_mends_can_be_copied() -> None:
    """The table wraps; a command to be pasted does not."""
    facts = on_gpu()
    facts["flash"], facts["python"]["packages"] = [], {"torch": "2.9.0"}
    facts["python"]["executable"] = f"/a/long/way/to/{'deep/' * 12}python"
    told = levels_of(MATRIX, looked(said("tried", "sdpa"), said("level", "flash", reason="[red]not[/red]")), ())
    text = shown(Checkup(PYTHON, facts, rows_of(facts), "cuda", told), 80)
    table, _, mends = text.partition("to mend")
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 80
    assert facts["python"]["executable"] in "".join(table.split())
    command = f"{facts['python']['executable']} -m pip install --no-build-isolation flash-attn"
    assert any(line.endswith(command) for line in mends.splitlines())
    assert text.startswith("4 of the 6 cells of m can run here")
    assert "not tried       batch_size=1|8" in text
    assert "[red]not[/red]" in text


def test_the_verdict_comes_first() -> None:
    """In each of its forms."""
    broken = without_torch("ModuleNotFoundError: No module named 'torch'", installed=False)
    unknown = levels_of(MATRIX, None, ())
    whole = levels_of(MATRIX, looked(), ())
    verdicts = {
        "Cells can run here, on cpu.": (on_cpu(), None),
        "No cell can run here: what is missing is torch and device.": (broken, unknown),
        "Which cells of m can run here is not known: its levels can't be tried without torch.": (on_cpu(), unknown),
        "All 6 cells of m can run here, as far as the machine goes.": (on_cpu(), whole),
    }
    for verdict, (facts, told) in verdicts.items():
        assert shown(Checkup(PYTHON, facts, rows_of(facts), "cpu", told), 120).splitlines()[0] == verdict


def keys(value: Any) -> Any:
    """The keys of a document, all the way down; of a list those of its first item."""
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items() if name not in ("packages", "seconds", "error")}
    return [keys(value[0])] if isinstance(value, list) and value else None


@pytest.mark.training
def test_the_document_of_this_machine(tmp_path: Path) -> None:
    """`doctor --json` with the demo: its schema, its facts in the form that the tests above use, its levels."""
    done = nanbisect(
        "doctor", "--json", ROOT / "matrices" / "demo.yaml", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert list(document) == ["schema", "usable", "device", "python", "rows", "matrix", "facts"]
    assert (document["schema"], document["usable"], document["device"]) == (1, True, "cpu")
    assert document["python"] == sys.executable
    states = {row["name"]: row["state"] for row in document["rows"]}
    assert {name: states[name] for name in ("python", "torch", "device", "sdpa.math", "transformers")} == dict.fromkeys(
        ("python", "torch", "device", "sdpa.math", "transformers"), "ok"
    )
    assert {"setting": "attention", "level": "sdpa", "factor": True, "runs": True, "why": ""} in document["matrix"][
        "levels"
    ]
    assert document["matrix"]["runnable"] == 24
    facts = document["facts"]
    for name in ("python", "torch", "cpu", "gpus", "kernels", "imports"):
        assert keys(facts[name]) == keys(on_cpu()[name]), name
    assert set(facts["machine"]) == set(on_cpu()["machine"])
    for name in ("slurm", "disk", "memory", "cores"):
        assert keys({**facts["machine"][name], "partitions": []}) == keys(
            {**on_cpu()["machine"][name], "partitions": []}
        )
    assert not list(tmp_path.iterdir())
