"""From one loss a channel to the loss of a micro-batch.

mean_per_channel   sum_c w_c (S_c / N_c) / sum_c w_c   over channels with N_c > 0: each channel's own mean, then
                   the weighted mean of channels. What MOSS-TTS-Local v1.5's `sft.py` computes, empty channels left
                   out of both sums as there.
token_weighted     sum_c w_c S_c / sum_c w_c N_c       over the same channels: a token counts by its channel's weight.

S_c is a channel's summed loss and N_c its number of labels in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanbisect.trainers.sft.problems import BadInput

Channels = Mapping[str, tuple[torch.Tensor, Any]]
SHAPE = "the recipe's losses() must return {channel: (summed loss, number of labels)} with at least one channel"


class Kept(NamedTuple):
    """A channel that has a part in the loss."""

    name: str
    weight: float
    total: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Combined:
    """The scalar loss, and all numbers of the micro-batch on its device: loss, then S_c, then N_c of each channel.

    `kept`: the channels with labels.
    """

    loss: torch.Tensor
    names: tuple[str, ...]
    numbers: torch.Tensor
    kept: tuple[Kept, ...]
    reduction: str


def channel_weights(given: Sequence[float] | None, channels: Sequence[str]) -> tuple[float, ...]:
    """One weight a channel. Two weights for more channels are text's, and the others' total shared evenly."""
    if given is None:
        return (1.0,) * len(channels)
    if len(given) == len(channels):
        return tuple(given)
    if len(given) == 2 and len(channels) > 2:
        text, audio = given
        return (text, *(audio / (len(channels) - 1),) * (len(channels) - 1))
    count = f"{len(channels)} channel{'s' if len(channels) > 1 else ''}"
    raise BadInput(
        f"channel_weights has {len(given)} weights, but the recipe returns {count} ({', '.join(channels)})\n"
        "try: two weights (text, then all others together), or one a channel"
    )


def combine(result: Any, given: Sequence[float] | None, reduction: str) -> Combined:
    """What a recipe's losses() returned as one loss in float32; reads the host once.

    Raises BadInput for another shape of result, and when no channel with a weight has a label.
    """
    channels = checked(result)
    weights = channel_weights(given, tuple(channels))
    sums = [total.float().reshape(()) for total, _ in channels.values()]
    counts = _counts([count for _, count in channels.values()], sums[0].device)
    rows = zip(channels, weights, sums, counts.unbind(), counts.tolist(), strict=True)
    kept = tuple(Kept(name, weight, total, count) for name, weight, total, count, labels in rows if labels > 0)
    if not sum(each.weight for each in kept) > 0:
        raise BadInput(
            "no channel with a weight has a label in this micro-batch: the mean of its loss would be 0/0\n"
            "try: mend or skip these records, or give their channel a weight"
        )
    if reduction == "token_weighted":
        loss = torch.stack([w * s for _, w, s, _ in kept]).sum() / sum(w * n for _, w, _, n in kept)
    else:
        loss = torch.stack([w * (s / n) for _, w, s, n in kept]).sum() / sum(w for _, w, _, _ in kept)
    numbers = torch.cat([torch.stack([loss, *sums]).detach(), counts])
    return Combined(loss, tuple(channels), numbers, kept, reduction)


def terms(combined: Combined) -> dict[str, torch.Tensor]:
    """What each channel adds to the loss, by name."""
    kept = combined.kept
    if combined.reduction == "token_weighted":
        whole = sum(w * n for _, w, _, n in kept)
        return {name: w * s / whole for name, w, s, _ in kept}
    return {name: w * (s / n) / sum(each.weight for each in kept) for name, w, s, n in kept}


def checked(result: Any) -> Channels:
    """The result with its names as text. Raises BadInput unless each channel is a scalar loss and a number."""
    if not isinstance(result, Mapping) or not result:
        raise BadInput(f"{SHAPE}, not {type(result).__name__ if result or result is None else 'nothing'}")
    for name, value in result.items():
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise BadInput(f"{SHAPE}; channel {name} is {type(value).__name__}, not a pair")
        _check_pair(name, *value)
    if not any(total.requires_grad for total, _ in result.values()):
        raise BadInput(
            "no loss that the recipe returned leads back to the model, so there is nothing to train\n"
            "try: losses() without torch.no_grad(), detach() or item()"
        )
    return {str(name): (total, count) for name, (total, count) in result.items()}


def _check_pair(name: str, total: Any, count: Any) -> None:
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.is_floating_point():
        found = (
            f"a {total.dtype} tensor of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else repr(total)
        )
        raise BadInput(f"{SHAPE}; the loss of channel {name} is {found[:80]}, not a tensor with one number")
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex():
        return
    if not isinstance(count, (int, float)):
        raise BadInput(f"{SHAPE}; the number of labels of channel {name} is {type(count).__name__}, not one number")


def _counts(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """N_c as float32 on the device, plain numbers in one transfer."""
    if not any(isinstance(value, torch.Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float32, device=device)
    tensors = [torch.as_tensor(value, dtype=torch.float32, device=device) for value in values]
    return torch.stack([tensor.detach().reshape(()) for tensor in tensors])
