"""From one loss a channel to the loss of a micro-batch.

mean_per_channel   sum_c w_c (S_c / N_c) / sum_c w_c   over channels with N_c > 0: each channel's own mean, then
                   the weighted mean of channels. What MOSS-TTS-Local v1.5's `sft.py` computes, empty channels left
                   out of both sums as there.
token_weighted     sum_c w_c S_c / sum_c w_c N_c       over all channels: a token counts by its channel's weight.

S_c is a channel's summed loss and N_c its number of labels in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanbisect.trainers.sft.problems import BadInput

Channels = Mapping[str, tuple[torch.Tensor, Any]]


def channel_weights(given: Sequence[float] | None, channels: Sequence[str]) -> tuple[float, ...]:
    """One weight a channel. Two weights for more channels are text's, and the others' total shared evenly."""
    if given is None:
        return (1.0,) * len(channels)
    if len(given) == len(channels):
        return tuple(given)
    if len(given) == 2 and len(channels) > 2:
        text, audio = given
        return (text, *(audio / (len(channels) - 1),) * (len(channels) - 1))
    raise BadInput(
        f"channel_weights has {len(given)} weights, but the recipe returns {len(channels)} channels ({', '.join(channels)})\n"
        "try: two weights (text, then all others together), or one a channel"
    )


def combine(channels: Channels, weights: Sequence[float], reduction: str) -> torch.Tensor:
    """The scalar loss in float32. Raises BadInput when no channel has a label."""
    sums = [total.float() for total, _ in channels.values()]
    counts = torch.stack([torch.as_tensor(count, device=sums[0].device).float() for _, count in channels.values()])
    rows = zip(weights, sums, counts.unbind(), counts.tolist(), strict=True)
    kept = [(weight, total, count) for weight, total, count, labels in rows if labels > 0]
    if not sum(weight for weight, _, _ in kept) > 0:
        raise BadInput(
            "no channel with a weight has a label in this micro-batch: the mean of its loss would be 0/0\n"
            "try: mend or skip these records, or give their channel a weight"
        )
    if reduction == "token_weighted":
        return torch.stack([w * s for w, s, _ in kept]).sum() / sum(w * n for w, _, n in kept)
    return torch.stack([w * (s / n) for w, s, n in kept]).sum() / sum(w for w, _, _ in kept)
