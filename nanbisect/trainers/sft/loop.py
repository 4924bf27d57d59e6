"""The training loop, top to bottom. One loop serves every cell; a factor is a value, not another script."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from nanbisect.trainers.sft import losses, setup
from nanbisect.trainers.sft.diary import Diary
from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.problems import BadInput
from nanbisect.trainers.sft.recipes.load import Recipe, chosen_records, load, user_code
from nanbisect.trainers.sft.view import Settings, plan_of, read_by


def train(job: Job, diary: Diary) -> str:
    """Train one cell; returns "done", or "stopped" at the first non-finite event."""
    plan = plan_of(job)
    settings = Settings(job, plan)
    device = setup.device_of(job.device)
    setup.determinism(plan.deterministic)
    set_seed(job.seed)
    accelerator = setup.accelerator_for(plan, device)
    recipe = load(job.recipe)
    records = chosen_records(recipe, settings, job)
    model = setup.build_model(recipe, settings, plan, device)
    optimizer = setup.build_optimizer(plan, [p for p in model.parameters() if p.requires_grad])
    loader = DataLoader(records, batch_size=plan.batch_size, collate_fn=Collate(recipe, settings, plan.recipe))  # type: ignore[arg-type]
    model, loader = accelerator.prepare(model, loader)
    norm = backward_only(model) if optimizer is None else None
    optimizer = optimizer if optimizer is None else accelerator.prepare(optimizer)
    diary.write("loaded", resolved=resolved(model, plan, device))
    steps = Steps(plan, diary)

    wanted = -(-len(records) // (plan.batch_size * plan.gradient_accumulation))
    while steps.taken < wanted:  # once over the records, and again for every step that a GradScaler skipped
        for ids, shape, batch in loader:
            with accelerator.accumulate(model):
                diary.write("micro_batch", step=steps.number, records=ids, **shape)
                with steps.kernel():
                    with accelerator.autocast(), user_code(plan.recipe, "losses"):
                        channels = recipe.losses(model, batch)
                    loss = losses.combine(channels, steps.weights(channels), plan.loss_reduction)
                    accelerator.backward(loss)
                steps.saw(loss, channels, settings)
                if not accelerator.sync_gradients:
                    continue
                if optimizer is None:
                    steps.end(norm.take(), skipped=False)
                else:
                    grad_norm = clip(accelerator, model, plan.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                    steps.end(grad_norm, skipped=optimizer.step_was_skipped)
            if probe_found():
                return "stopped"
            if steps.taken == wanted:
                break
    return "done"


class Collate:
    """The recipe's batch, with its record ids and its padding (told on the CPU, where it costs nothing)."""

    def __init__(self, recipe: Recipe, settings: Settings, name: str) -> None:
        self.recipe, self.settings, self.name = recipe, settings, name

    def __call__(self, records: list[Any]) -> tuple[list[str], dict[str, Any], Any]:
        """(record ids, shape, batch) of one micro-batch."""
        with user_code(self.name, "collate"):
            batch = self.recipe.collate(records, self.settings)
        return [str(record["id"]) for record in records], shape(batch), batch


def shape(batch: Any) -> dict[str, Any]:
    """Rows, padded length and padded positions, from `attention_mask` where the batch has a 2-D one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return {}
    return {"length": mask.shape[1], "padding": int((mask == 0).sum()), "positions": mask.numel()}


class Steps:
    """Counts optimizer steps and writes what each computed, with one transfer to the host a step."""

    def __init__(self, plan: SimpleNamespace, diary: Diary) -> None:
        self.diary, self.plan = diary, plan
        self.kernel = setup.attention_kernel(plan)
        self.number, self.taken = 1, 0
        self.micro: list[tuple[torch.Tensor, Mapping[str, Any]]] = []
        self.began = time.perf_counter()

    def weights(self, channels: Any) -> tuple[float, ...]:
        """One weight for each channel that the recipe returned."""
        if not isinstance(channels, Mapping) or not channels:
            raise BadInput("the recipe's losses() must return {channel: (summed loss, count)} with at least one channel")
        return losses.channel_weights(self.plan.channel_weights, tuple(channels))

    def saw(self, loss: torch.Tensor, channels: losses.Channels, settings: Settings) -> None:
        """A micro-batch went backward."""
        if self.number == 1 and not self.micro:
            self.diary.write("recipe_read", settings=sorted(read_by(settings)))
        parts = {name: (total.detach(), count) for name, (total, count) in channels.items()}
        self.micro.append((loss.detach(), parts))

    def end(self, norm: torch.Tensor, *, skipped: bool) -> None:
        """The optimizer stepped, or its GradScaler skipped."""
        names = [(index, name) for index, (_, parts) in enumerate(self.micro) for name in parts]
        pairs = [self.micro[index][1][name] for index, name in names]
        flat = [loss for loss, _ in self.micro] + [part for pair in pairs for part in pair]
        numbers = torch.stack([torch.as_tensor(x, device=norm.device).float() for x in [norm, *flat]]).tolist()
        values = numbers[1 + len(self.micro) :]
        channels: list[dict[str, list[float]]] = [{} for _ in self.micro]
        for place, (index, name) in enumerate(names):
            channels[index][name] = values[2 * place : 2 * place + 2]
        self.diary.write(
            "step", step=self.number, taken=not skipped, grad_norm=numbers[0],
            losses=numbers[1 : 1 + len(self.micro)], channels=channels, seconds=time.perf_counter() - self.began,
        )  # fmt: skip
        self.taken += not skipped
        self.number += 1
        self.micro, self.began = [], time.perf_counter()


def clip(accelerator: Accelerator, model: torch.nn.Module, limit: float | None) -> torch.Tensor:
    """Clip to `limit`, or only measure: the total L2 norm before clipping, as a scalar tensor."""
    if limit is not None:
        norm: torch.Tensor = accelerator.clip_grad_norm_(model.parameters(), limit)
        return norm
    accelerator.unscale_gradients()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads]))


class FreedNorm:
    """The norm of gradients that are freed as they arrive (of the last micro-batch each)."""

    def __init__(self) -> None:
        self.squares: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """The total L2 norm since the last call."""
        probe = sys.modules.get("_nanbisect_probe")
        if probe is not None:
            probe.end_of_step()
        squares, self.squares = self.squares, []
        return torch.stack(squares).sum().sqrt()

    def arrived(self, parameter: torch.Tensor) -> None:
        """Take the gradient's square and drop it."""
        assert parameter.grad is not None
        self.squares.append(torch.linalg.vector_norm(parameter.grad.float()).square())
        parameter.grad = None


def backward_only(model: torch.nn.Module) -> FreedNorm:
    """No optimizer: every gradient is measured and freed as it arrives."""
    norm = FreedNorm()
    probe = sys.modules.get("_nanbisect_probe")
    if probe is not None:
        probe.backward_only()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(norm.arrived)
    return norm


def probe_found() -> bool:
    """Whether the probe, if it is there, has seen a non-finite value."""
    probe = sys.modules.get("_nanbisect_probe")
    return probe is not None and probe.found()


def resolved(model: torch.nn.Module, plan: SimpleNamespace, device: torch.device) -> dict[str, Any]:
    """What the settings became: requested is not resolved."""
    dtypes: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + 1
    config = getattr(model, "config", None)
    return {
        **vars(plan),
        "device": str(device),
        "model_class": type(model).__name__,
        "attention_class": getattr(config, "_attn_implementation", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "parameter_dtypes": dtypes,
        "threads": torch.get_num_threads(),
    }
