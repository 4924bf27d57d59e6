"""Rows of the attention kernels: those of SDPA, and FlashAttention. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanbisect.environment.row import DTYPES, NO_MODULE, Facts, Row, State, gpu_mend, listed, pip, working_gpus

FAST = ("bf16", "fp16")
AMPERE = (8, 0)
OLDEST_CHOICE = "2.3"


def kernel_rows(facts: Facts) -> Iterator[Row]:
    """A row a kernel of SDPA, and a kind of GPU where there are several."""
    devices = list(dict.fromkeys(entry["device"] for entry in facts["kernels"]))
    for entry in facts["kernels"]:
        suffix = f".{entry['device'].partition(':')[2]}" if len(devices) > 1 else ""
        yield kernel_row(f"sdpa.{entry['kernel']}{suffix}", entry, facts)


def kernel_row(name: str, entry: Facts, facts: Facts) -> Row:
    """By what ran: each dtype, without and with an explicit mask."""
    level, trials = f"attention=sdpa:{entry['kernel']}", entry.get("trials", ())
    device = entry["device"].partition(":")[0]
    bad = [dtype for dtype in DTYPES if any(_is_nan(trial) and trial["dtype"] == dtype for trial in trials)]
    if bad:
        means = f"{level} brings a NaN by itself, also on ordinary numbers"
        mend = "another torch or driver, and a report to PyTorch"
        return Row(name, "warn", f"gives NaN or Inf in {listed(bad)} on {device}", means, mend, levels=(level,))
    if not any(trial["error"] is None for trial in trials):
        why = entry.get("error") or next((trial["error"] for trial in trials), "it was not tried")
        mend = _mend_kernel(entry["kernel"], why, device, facts)
        return Row(name, "missing", _why(why, device), f"{level} cells can't run here", mend, levels=(level,))
    found, limits = _extent(trials)
    if not limits:
        return Row(name, "ok", found, levels=(level,))
    mend = "attention=sdpa for those cells; torch then chooses the kernel"
    return Row(name, "warn", found, f"{level} can't run {', nor '.join(limits)}", mend, levels=(level,))


def _extent(trials: Sequence[Facts]) -> tuple[str, list[str]]:
    """In which dtypes a kernel ran, with which masks; and what cells that leaves out."""
    ran = {(trial["dtype"], trial["mask"]) for trial in trials if trial["error"] is None}
    tried = {trial["dtype"] for trial in trials}
    both = [dtype for dtype in DTYPES if {(dtype, False), (dtype, True)} <= ran]
    bare = [dtype for dtype in DTYPES if (dtype, False) in ran and dtype not in both]
    none = [dtype for dtype in DTYPES if dtype in tried and dtype not in (*both, *bare)]
    parts = [f"runs in {listed(both)}, with and without a mask"] if both else []
    parts += [f"{'' if both else 'runs '}in {listed(bare)} without a mask only"] if bare else []
    parts += [f"not in {listed(none)}"] if none else []
    if len(trials) < 2 * len(DTYPES):
        parts.append("the rest was not tried: the last trial left the device broken")
    limits = [f"batches with padding{f' in {listed(bare)}' if both else ''}"] if bare else []
    return "; ".join(parts), limits + ([f"cells that attend in {listed(none)}"] if none else [])


def _is_nan(trial: Facts) -> bool:
    return "NaN or Inf" in (trial["error"] or "")


def _why(why: str, device: str) -> str:
    """What torch says where there is no such kernel at all is of no use to anybody."""
    if "No viable backend" in why or "No available kernel" in why:
        return f"torch has no such kernel for {device}"
    return f"does not run on {device}: {why}"


def _mend_kernel(kernel: str, why: str, device: str, facts: Facts) -> str:
    if "torch.nn.attention" in why:
        return pip(facts, f"'torch>={OLDEST_CHOICE}' (older ones can't be told which kernel to use)")
    if device == "cpu" and kernel in ("efficient", "cudnn"):
        return gpu_mend(facts)
    return "attention=sdpa lets torch choose a kernel that runs"


def flash_rows(facts: Facts) -> Iterator[Row]:
    """FlashAttention 2; and 3 where it is installed."""
    packages = facts["python"]["packages"]
    tried = {entry["package"]: entry for entry in facts["flash"]}
    yield flash_row("flash-attn", packages.get("flash-attn"), tried.get("flash_attn"), facts)
    third = packages.get("flash-attn-3")
    if third or "flash_attn_interface" in tried:
        yield flash_row("flash-attn-3", third or "of unknown version", tried.get("flash_attn_interface"), facts)


def flash_row(name: str, version: str | None, tried: Facts | None, facts: Facts) -> Row:
    """Installed, imported, and run on the GPU that is here."""
    level = "attention=flash3" if name.endswith("3") else "attention=flash"
    means, gpus = f"{level} cells can't run here", working_gpus(facts)
    dtypes = (tried or {}).get("dtypes", {})
    can = [dtype for dtype in FAST if dtypes.get(dtype, "") is None]
    if can:
        missing = [dtype for dtype in FAST if dtype not in can]
        state: State = "warn" if missing else "ok"
        return Row(name, state, f"{version}, runs in {listed(can)}", levels=(level,))
    if not version:
        return Row(name, "missing", "not installed", means, install_flash(facts), levels=(level,))
    if not gpus:
        return Row(name, "missing", f"{version}, and no GPU to run on", means, gpu_mend(facts), levels=(level,))
    why = (tried or {}).get("error") or next(iter(dtypes.values()), "it was not tried")
    return Row(
        name, "missing", f"{version}, does not run: {why}", means, broken_flash(why, name, facts), levels=(level,)
    )


def install_flash(facts: Facts) -> str:
    """How to get FlashAttention 2, if it would run here at all."""
    gpus = working_gpus(facts)
    if not gpus:
        return gpu_mend(facts)
    if facts["torch"].get("cuda") and all(tuple(gpu["capability"]) < AMPERE for gpu in gpus):
        return "a GPU from Ampere on (FlashAttention 2 has no kernels for this one)"
    return pip(facts, "--no-build-isolation flash-attn")


def broken_flash(why: str, name: str, facts: Facts) -> str:
    """What to do about a package that is there and does not work."""
    if "undefined symbol" in why or ".so" in why:
        again = pip(facts, f"--no-build-isolation --no-cache-dir --no-deps --force-reinstall {name}")
        return f"it was built for another torch: {again}"
    if "only supports Ampere" in why:
        return "a GPU from Ampere on"
    if NO_MODULE.search(why):
        return f"{pip(facts, f'--no-build-isolation {name}')} (it brings what the package needs)"
    return f"another version of {name}; attention=sdpa meanwhile"
