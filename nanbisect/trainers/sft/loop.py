"""The training loop, top to bottom. One loop serves every cell; a factor is a value, not another script."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from nanbisect.trainers.sft import losses, probe, setup
from nanbisect.trainers.sft.alone import ChannelsAlone
from nanbisect.trainers.sft.diary import Diary
from nanbisect.trainers.sft.job import Job
from nanbisect.trainers.sft.problems import BadInput
from nanbisect.trainers.sft.recipes.load import Recipe, chosen_records, load, user_code
from nanbisect.trainers.sft.view import Settings, plan_of, read_by

TRIES = 64  # of one step under a GradScaler: from 65536 it is at scale 1 after 16


class Fresh:
    """Where recipe and model come from: imported and loaded for this cell."""

    def recipe(self, job: Job) -> Recipe:
        """The recipe's four functions."""
        return load(job.recipe)

    def model(self, recipe: Recipe, settings: Settings, plan: SimpleNamespace, device: torch.device) -> torch.nn.Module:
        """See `setup.build_model`."""
        return setup.build_model(recipe, settings, plan, device)


def train(job: Job, diary: Diary, source: Fresh | None = None) -> str:
    """Train one cell; returns "done", or "stopped" at the first non-finite event."""
    source, plan = source or Fresh(), plan_of(job)
    settings = Settings(job, plan)
    device = setup.device_of(job.device)
    setup.determinism(plan.deterministic)
    set_seed(job.seed)
    accelerator = setup.accelerator_for(plan, device)
    recipe = source.recipe(job)
    records: Any = chosen_records(recipe, settings, job)
    model = source.model(recipe, settings, plan, device)
    optimizer: Any = setup.build_optimizer(plan, setup.trainable(model))
    loader: Any = DataLoader(records, plan.batch_size, collate_fn=Collate(recipe, settings, plan.recipe))
    model, loader = accelerator.prepare(model, loader)
    probe.model(model)
    alone = ChannelsAlone.wanted(model)  # of a trace: which channel's loss brings it
    freed = FreedNorm(model) if optimizer is None else None
    optimizer = optimizer if optimizer is None else accelerator.prepare(optimizer)
    diary.write("loaded", resolved=resolved(model, plan, device))
    steps = Steps(plan, diary)

    for window in windows(loader, plan.gradient_accumulation):
        for _ in range(TRIES):  # a step that a GradScaler skips is tried again on the same records, at half the scale
            for ids, shape, batch in window:
                diary.write("micro_batch", **steps.place, records=ids, **shape)
                with steps.kernel():
                    with accelerator.autocast(), user_code(plan.recipe, "losses"):
                        channels = recipe.losses(model, batch)
                        steps.autocast = setup.autocast_dtype(device.type)
                    loss = steps.loss_of(channels, settings)
                    if alone is not None and alone.due(steps):
                        diary.write("channels_alone", **alone.tell(steps, accelerator, plan.gradient_accumulation))
                        return "done"
                    accelerator.backward(loss / plan.gradient_accumulation)
            if freed is not None:
                skipped = steps.end(freed.take(), skipped=False)
            else:
                norm = clip(accelerator, model, plan.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                skipped = steps.end(norm, skipped=optimizer.step_was_skipped)
            if probe.found():
                return "stopped"
            if not skipped:
                break
    return "done"


def windows(loader: Iterable[Any], accumulation: int) -> Iterator[list[Any]]:
    """The micro-batches of each optimizer step; the last may have fewer."""
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation)):
        yield window


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
        self.number, self.window = 1, 1
        self.names: tuple[str, ...] = ()
        self.autocast: str | None = None
        self.micro: list[losses.Combined] = []
        self.began = time.perf_counter()

    @property
    def place(self) -> dict[str, int]:
        """`step` counts every try, as the probe does; `window` the optimizer steps that were wanted."""
        return {"step": self.number, "window": self.window}

    def loss_of(self, channels: Any, settings: Settings) -> torch.Tensor:
        """The micro-batch's loss from what the recipe returned. Raises BadInput."""
        combined = losses.combine(channels, self.plan.channel_weights, self.plan.loss_reduction)
        if not self.names:
            self.names = combined.names
            self.diary.write("recipe_read", settings=sorted(read_by(settings)), autocast=self.autocast)
        elif combined.names != self.names:
            raise BadInput(
                f"the recipe's losses() returned other channels than at first: {', '.join(combined.names)} instead of "
                f"{', '.join(self.names)}\ntry: always return all channels, with a count of 0 for an empty one"
            )
        self.micro.append(combined)
        return combined.loss

    def end(self, norm: torch.Tensor, *, skipped: bool) -> bool:
        """The optimizer stepped, or its GradScaler skipped; returns whether it skipped."""
        numbers = torch.cat([norm.detach().float().reshape(1), *[micro.numbers for micro in self.micro]]).tolist()
        grad_norm, rest = numbers[0], iter(numbers[1:])
        totals, channels = [], []
        for micro in self.micro:
            totals.append(next(rest))
            sums = [next(rest) for _ in micro.names]
            channels.append({name: [total, next(rest)] for name, total in zip(micro.names, sums, strict=True)})
        self.diary.write(
            "step", **self.place, taken=not skipped, grad_norm=grad_norm,
            losses=totals, channels=channels, seconds=time.perf_counter() - self.began,
        )  # fmt: skip
        what = f"step {self.window}: loss {sum(totals) / max(len(totals), 1):.6g}, gradient norm {grad_norm:.6g}"
        sys.stdout.write(f"{what}{', skipped by the GradScaler' if skipped else ''}\n")
        self.window += not skipped
        self.number += 1
        self.micro, self.began = [], time.perf_counter()
        return skipped


def clip(accelerator: Accelerator, model: torch.nn.Module, limit: float | None) -> torch.Tensor:
    """Clip to `limit`, or only measure: the total L2 norm before clipping, as a scalar tensor."""
    if limit is not None:
        clipped: torch.Tensor = accelerator.clip_grad_norm_(model.parameters(), limit)
        return clipped
    accelerator.unscale_gradients()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    probe.norm(norm)
    return norm


class FreedNorm:
    """No optimizer: every gradient is measured and freed as it arrives.

    The norm is the root of the sum of all squares that arrived. That is the gradient's norm for one
    micro-batch without reentrant checkpointing; else parts that would have been added are squared apart.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.squares: list[torch.Tensor] = []
        probe.backward_only()
        for parameter in setup.trainable(model):
            parameter.register_post_accumulate_grad_hook(self.arrived)  # type: ignore[no-untyped-call]

    def take(self) -> torch.Tensor:
        """The norm since the last call."""
        squares, self.squares = self.squares, []
        norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
        probe.norm(norm)
        probe.end_of_step()
        return norm

    def arrived(self, parameter: torch.Tensor) -> None:
        """Take the gradient's square and drop it."""
        if parameter.grad is not None:
            self.squares.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square())
            parameter.grad = None


def resolved(model: torch.nn.Module, plan: SimpleNamespace, device: torch.device) -> dict[str, Any]:
    """What the settings became: requested is not resolved."""
    dtypes: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + 1
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return {
        **vars(plan),
        "device": str(device),
        "model_class": type(model).__name__,
        "attention_class": chosen if isinstance(chosen, str) else None,  # a user's config may hold anything
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "parameter_dtypes": dtypes,
        "threads": torch.get_num_threads(),
    }
