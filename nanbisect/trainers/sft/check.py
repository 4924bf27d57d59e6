"""One look at this machine, the recipe and the data, before any cell runs.

Each level that a machine may lack is tried once, on small tensors: its forward, backward and step. No optimizer
is made otherwise: any of torch's imports torch._dynamo, which takes longer than all the rest.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanbisect.trainers.sft import setup
from nanbisect.trainers.sft.diary import Diary
from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.problems import BadInput, Unsupported
from nanbisect.trainers.sft.recipes.load import chosen_records, load, user_code
from nanbisect.trainers.sft.settings import SETTINGS
from nanbisect.trainers.sft.view import Settings, plan_of

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGE = 1_000_000_000  # parameters above which a CPU run must be asked for


def check(job: Job, diary: Diary) -> str:
    """Write what this machine is and what it can't run, then try the recipe and the data. Returns "done"."""
    levels(job, diary)
    _try_recipe(job, setup.device_of(job.device), diary)
    return "done"


def levels(job: Job, diary: Diary) -> str:
    """Write what this machine is, which levels were tried on it, and which of them it can't run. Returns "done"."""
    device = setup.device_of(job.device)
    diary.write("environment", **environment(device))
    for setting in job.levels:
        for level in job.levels[setting]:
            reason = why_not(setting, level, job, device)
            if reason is not None:
                diary.write("level", setting=setting, level=level, reason=reason)
            elif setting in TRIALS:
                diary.write("tried", setting=setting, level=level)
    return "done"


def _try_recipe(job: Job, device: torch.device, diary: Diary) -> None:
    """Load the recipe and collate every record that training will see. Raises BadInput.

    For causal-lm the model's size is looked at, too.
    """
    plan = plan_of(job)
    settings = Settings(job, plan)
    recipe = load(job.recipe)
    count = getattr(recipe, "parameter_count", None)
    if count is not None:
        with user_code(plan.recipe, "parameter_count"):
            parameters = int(count(settings))
        diary.write("model", parameters=parameters)
        if parameters > LARGE and device.type == "cpu" and job.device != "cpu":
            raise BadInput(
                f"the model has {parameters / 1e9:.1f} billion parameters "
                "and this machine has no GPU that torch can use\n"
                "try: --device cpu to train it on the CPU all the same, or a machine with a GPU" + _srun_line()
            )
    records = chosen_records(recipe, settings, job)
    unique = {record["id"]: record for record in records}
    with user_code(plan.recipe, "collate"):
        for record in unique.values():
            recipe.collate([record], settings)
        recipe.collate(records[:2], settings)
    diary.write("data", records=len(unique), size=job.size)


def _srun_line() -> str:
    return (
        " (Slurm is here: srun --gres=gpu:1 nanbisect run ...)"
        if any(Path(folder, "srun").exists() for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
        else ""
    )


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and devices, as a report shows them."""
    names = ("transformers", "accelerate", "flash-attn", "numpy")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "device": str(device),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "packages": {name: version for name in names if (version := _version(name))},
        "gpus": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus],
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": " ".join((platform.system(), *platform.libc_ver())).strip(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not(setting: str, level: str, job: Job, device: torch.device) -> str | None:
    """Why this machine can't run a level, or None. What needs no trial is taken to work."""
    trial = TRIALS.get(setting)
    if trial is None:
        return None
    try:
        trial(level, job, device)
    except Unsupported as error:
        return str(error)
    except (RuntimeError, ImportError, ValueError, TypeError, AttributeError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"{setting}={level} was tried on {device} and failed: {first}"
    return None


def _attention(level: str, job: Job, device: torch.device) -> None:
    if level == "flash":
        return _flash(device)
    if level in ("eager", "sdpa"):
        return None
    kernel = level.partition(":")[2]
    failures, dtypes = [], _attention_dtypes(job)
    for dtype in dtypes:
        try:
            _sdpa(kernel, dtype, device)
        except RuntimeError as error:
            failures.append(error)
    if len(failures) == len(dtypes):
        raise failures[0]
    return None


def _attention_dtypes(job: Job) -> set[torch.dtype]:
    """What attention may be computed in: the autocast dtypes, and without autocast those of the parameters."""
    precisions, own = _levels(job, "precision"), _levels(job, "param_dtype")
    return {HALVES[level] for level in precisions if level != "fp32"} | {
        HALVES[level] for level in own if "fp32" in precisions
    }


def _levels(job: Job, name: str) -> tuple[str, ...]:
    return job.levels.get(name) or (job.settings.get(name, SETTINGS[name].default),)


def _flash(device: torch.device) -> None:
    if importlib.util.find_spec("flash_attn") is None:
        raise Unsupported("FlashAttention 2 (the package flash-attn) is not installed")
    if device.type != "cuda":
        raise Unsupported("FlashAttention 2 needs a CUDA GPU")
    from flash_attn import flash_attn_func

    query = torch.randn(1, 16, 2, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    flash_attn_func(query, query, query, causal=True).sum().backward()


def _sdpa(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    query = torch.randn(1, 2, 16, 32, device=device, dtype=dtype, requires_grad=True)
    with setup.forced_kernel(kernel):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).float().sum().backward()  # type: ignore[no-untyped-call]


def _precision(level: str, job: Job, device: torch.device) -> None:
    if level == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise Unsupported("this GPU has no bf16")
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=HALVES[level], enabled=level != "fp32"):
        loss = (weight @ weight).float().sum()
    if level == "fp16":
        loss = torch.amp.GradScaler(device.type).scale(loss)
    loss.backward()  # type: ignore[no-untyped-call]


def _param_dtype(level: str, job: Job, device: torch.device) -> None:
    weight = torch.randn(8, 8, device=device, dtype=HALVES[level], requires_grad=True)
    (weight @ weight).float().sum().backward()  # type: ignore[no-untyped-call]


def _optimizer(level: str, job: Job, device: torch.device) -> None:
    if level not in ("adamw_foreach", "adamw_fused"):  # the others take no kernel of their own
        return
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    plan = plan_of(job)
    plan.optimizer = level
    optimizer = setup.build_optimizer(plan, [weight])
    weight.grad = torch.ones_like(weight)
    if optimizer is not None:
        optimizer.step()


TRIALS: dict[str, Callable[[str, Job, torch.device], None]] = {
    "attention": _attention,
    "precision": _precision,
    "param_dtype": _param_dtype,
    "optimizer": _optimizer,
}
