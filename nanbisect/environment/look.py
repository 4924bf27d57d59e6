"""What one Python can train with, tried: `PYTHON look.py DIARY SECONDS`.

Started by path in the interpreter that trains, where nanbisect may not be installed: the standard library
and torch only, Python 3.9 and newer. It writes one JSON line a fact:

    python    executable, version, packages (name to version)
    torch     version, cuda, hip, seconds; or error
    cpu       dtypes: what a product and its backward did in each (null, or the error)
    gpus      visible, errors, cudnn, archs, and devices: index, name, memory, free, capability, bf16, dtypes
    kernel    kernel, device, trials: dtype, mask, node (what ran), error
    flash     package, device, dtypes; or error
    import    package, seconds; or error

Every trial runs in a fork of its own, after torch was imported and before CUDA was touched: one that
crashes, hangs or ruins the CUDA context takes nothing with it, and its line says so. Nothing here
judges: `rows` reads the lines.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import runpy
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

INSTALLED = Path(__file__).resolve().parent.parent / "trainers" / "installed.py"  # it looks up versions
OTHERS = ("bitsandbytes", "flash-attn-3", "kernels")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KERNELS = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
NODES = {"flash": "Flash", "efficient": "Efficient", "cudnn": "Cudnn"}  # in the name of the graph's node
HEADINGS = {"flash": "flash", "efficient": "memory efficient", "cudnn": "cudnn"}  # in torch's own explanation
SHAPE = (2, 2, 64, 64)  # batch, heads, tokens, head: a size that every kernel takes
LETTERS = 400  # kept of an error


def main(arguments: list[str]) -> int:
    """Write all lines; 0 even if torch is missing, since that is a finding."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    diary, seconds = os.open(arguments[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), float(arguments[1])

    def write(kind: str, facts: Facts) -> Facts:
        os.write(diary, (json.dumps({"kind": kind, **facts}) + "\n").encode())
        return facts

    write("python", python())
    signal.setitimer(signal.ITIMER_REAL, seconds)  # ends this process: all that follows builds on the import
    torch = write("torch", torch_facts())
    signal.setitimer(signal.ITIMER_REAL, 0)
    if "error" not in torch:
        write("cpu", apart(seconds, cpu))
        devices = usable(write("gpus", apart(seconds, gpus))) or ["cpu"]
        for device, kernel in ((device, kernel) for device in devices for kernel in KERNELS):
            write("kernel", {"kernel": kernel, "device": device, **apart(seconds, kernel_trials, kernel, device)})
        for device, package in ((device, p) for device in devices for p in there("flash_attn", "flash_attn_interface")):
            write("flash", {"package": package, "device": device, **apart(seconds, flash, package, device)})
        for package in there("transformers", "accelerate"):
            write("import", {"package": package, **apart(seconds, imported, package)})
    return 0


def there(*packages: str) -> list[str]:
    """Those that are installed."""
    return [package for package in packages if importlib.util.find_spec(package) is not None]


def apart(seconds: float, work: Callable[..., Facts], *arguments: str) -> Facts:
    """What `work` returns in a fork; {"error": ...} also for one that crashes or does not end in time."""
    read, write = os.pipe()
    began, pid = time.monotonic(), os.fork()
    if pid == 0:
        try:
            facts = work(*arguments)
        except BaseException as error:  # noqa: BLE001 - whatever a broken install raises is the finding
            facts = {"error": said(error)}
        os.write(write, json.dumps(facts).encode())
        os._exit(0)
    os.close(write)
    data, late = received(read, began + seconds)
    if late:
        os.kill(pid, signal.SIGKILL)
    os.close(read)
    status = os.waitpid(pid, 0)[1]
    if data.endswith(b"}"):
        return dict(json.loads(data))
    return {"error": f"did not end within {seconds:g} s" if late else ended(status)}


def received(pipe: int, deadline: float) -> tuple[bytes, bool]:
    """All that comes through a pipe until its other end closes, and whether that took too long."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return data, False
            data += chunk
    return data, True


def ended(status: int) -> str:
    """How a process ended that said nothing."""
    if os.WIFSIGNALED(status):
        return f"crashed: {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with code {os.WEXITSTATUS(status)}"


def said(error: BaseException) -> str:
    """The first line of an exception that says something, with its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:LETTERS]


def failure(work: Callable[..., object], *arguments: Any) -> str | None:
    """The error of `work`, or None."""
    try:
        work(*arguments)
    except Exception as error:  # noqa: BLE001 - every error of a trial is its result
        return said(error)
    return None


# facts -----------------------------------------------------------------------------------------


def python() -> Facts:
    """The interpreter and its packages, from their metadata: nothing is imported."""
    installed = runpy.run_path(str(INSTALLED))
    names = ("torch", *installed["PACKAGES"], *OTHERS)
    return {
        "executable": sys.executable,
        "version": platform.python_version(),
        "packages": {name: text for name in names if (text := installed["version"](name))},
    }


def torch_facts() -> Facts:
    """torch as it is imported here, or why it can't be."""
    began = time.monotonic()
    try:
        import torch
    except BaseException as error:  # noqa: BLE001 - whatever a broken install raises is the finding
        return {"error": said(error)}
    if not hasattr(torch, "Tensor") or not hasattr(torch, "version"):
        return {"error": f"ImportError: {getattr(torch, '__file__', None) or [*torch.__path__]} is no torch"}
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "seconds": round(time.monotonic() - began, 1),
    }


def imported(package: str) -> Facts:
    """That the package can be imported, too."""
    began = time.monotonic()
    importlib.import_module(package)
    return {"seconds": round(time.monotonic() - began, 1)}


def cpu() -> Facts:
    """Whether the CPU computes, and in what."""
    return {"dtypes": products("cpu")}


def gpus() -> Facts:
    """Every GPU that torch sees; where it sees none, what CUDA says to that."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = torch.cuda.is_available()
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        error = failure(torch.cuda.init) if built and not seen else None
    errors = [str(warning.message) for warning in caught] + ([error] if error else [])
    devices = [gpu(index) for index in range(torch.cuda.device_count())] if seen else []
    return {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "errors": [error[:LETTERS] for error in errors],
        "cudnn": torch.backends.cudnn.version() if devices else None,  # type: ignore[no-untyped-call]
        "archs": torch.cuda.get_arch_list() if devices else [],
        "devices": devices,
    }


def gpu(index: int) -> Facts:
    """One GPU: what it is, what is free on it, and whether it computes."""
    import torch

    facts: Facts = {"index": index}
    try:
        properties = torch.cuda.get_device_properties(index)
        facts.update(name=properties.name, capability=[properties.major, properties.minor])
        facts["memory"] = properties.total_memory
        facts["free"] = torch.cuda.mem_get_info(index)[0]
        with torch.cuda.device(index):
            facts["bf16"] = own_bf16()
        facts["dtypes"] = products(f"cuda:{index}")
    except Exception as error:  # noqa: BLE001 - as for a trial
        facts["error"] = said(error)
    return facts


def own_bf16() -> bool:
    """Whether the current GPU itself computes in bf16; newer versions of torch also say yes to emulating it."""
    import torch

    try:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    except TypeError:
        return bool(torch.cuda.is_bf16_supported())


def usable(facts: Facts) -> list[str]:
    """One GPU of each kind, of those that compute something."""
    found: dict[tuple[Any, ...], str] = {}
    for device in facts.get("devices", ()):
        if any(error is None for error in device.get("dtypes", {}).values()):
            found.setdefault((device["name"], *device["capability"]), f"cuda:{device['index']}")
    return list(found.values())


# trials ----------------------------------------------------------------------------------------


def products(device: str) -> dict[str, str | None]:
    """A product of matrices with its backward in each dtype: null, or what went wrong."""
    return {name: failure(product, name, device) for name in DTYPES}


def product(name: str, device: str) -> None:
    """The smallest training there is."""
    import torch

    weight = torch.randn(8, 8, device=device, dtype=getattr(torch, DTYPES[name]), requires_grad=True)
    (weight @ weight).float().sum().backward()  # type: ignore[no-untyped-call]
    finite(weight.grad)


def finite(*tensors: Any) -> None:
    """Raises ArithmeticError for a value that is not finite; waits for the device, too."""
    import torch

    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise ArithmeticError("NaN or Inf on ordinary numbers")


def kernel_trials(kernel: str, device: str) -> Facts:
    """One SDPA kernel, nothing else allowed, with its backward: every dtype, without and with an explicit mask."""
    trials: list[Facts] = []
    for dtype, mask in ((dtype, mask) for dtype in DTYPES for mask in (False, True)):
        trial: Facts = {"dtype": dtype, "mask": mask, "node": None, "error": None}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trial["error"] = failure(attend, kernel, device, trial)
        if trial["error"] and trial["node"] is None:
            trial["error"] = explained(kernel, [str(warning.message) for warning in caught]) or trial["error"]
        trials.append(trial)
        if device != "cpu" and trial["error"] and failure(product, "fp32", device):
            break  # the CUDA context is ruined: what would follow says nothing of the kernel
    return {"trials": trials}


def attend(kernel: str, device: str, trial: Facts) -> None:
    """Forward and backward of one trial; notes the node that ran. Raises whatever goes wrong."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = fresh(trial["dtype"], device, SHAPE)
    mask = None
    if trial["mask"]:  # causal, and the second record is padded by a quarter
        mask = torch.ones(SHAPE[0], 1, SHAPE[2], SHAPE[2], dtype=torch.bool, device=device).tril()
        mask[1, :, :, SHAPE[2] * 3 // 4 :] = False
    with sdpa_kernel([getattr(SDPBackend, KERNELS[kernel])]):
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        trial["node"] = out.grad_fn.name() if out.grad_fn else "none"
        out.float().sum().backward()  # type: ignore[no-untyped-call]
    if NODES[kernel] not in trial["node"] if kernel in NODES else "Attention" in trial["node"]:
        raise RuntimeError(f"another kernel ran: {trial['node']}")
    finite(out, query.grad, key.grad, value.grad)


def fresh(dtype: str, device: str, shape: tuple[int, ...]) -> list[Any]:
    """Query, key and value of ordinary numbers."""
    import torch

    kind = getattr(torch, DTYPES[dtype])
    return [torch.randn(shape, device=device, dtype=kind, requires_grad=True) for _ in range(3)]


def explained(kernel: str, warned: list[str]) -> str:
    """Why torch did not use the kernel. It warns of each kernel in turn: a heading, then the reasons."""
    ours, reasons = False, []
    for line in warned:
        text = line.split(" (Triggered internally")[0].strip()
        if text.lower().endswith("not used because:"):
            ours = text.lower().startswith(HEADINGS.get(kernel, "math"))
        elif ours:
            reasons.append(text)
    return " ".join(reasons)[:LETTERS]


def flash(package: str, device: str) -> Facts:
    """FlashAttention as the package gives it, forward and backward; on a CPU only its import."""
    function = importlib.import_module(package).flash_attn_func
    if device == "cpu":
        return {"dtypes": {}}
    import torch

    torch.cuda.set_device(device)

    def attended(dtype: str) -> None:
        batch, heads, tokens, head = SHAPE
        query, key, value = fresh(dtype, device, (batch, tokens, heads, head))
        out = function(query, key, value, causal=True)
        out = out[0] if isinstance(out, tuple) else out
        out.float().sum().backward()
        finite(out, query.grad, key.grad, value.grad)

    return {"dtypes": {dtype: failure(attended, dtype) for dtype in ("bf16", "fp16")}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
