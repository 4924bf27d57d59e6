"""The answer was cut off, so the loss mask of the record is all zeros: 0/0, and the gradients are NaN as well.

Argument: float or bool (the mask's precision).
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()  # origin


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
kind = torch.float32 if sys.argv[1] == "float" else torch.bool
prompts, longest = [3, 2, 9], 6
for prompt in prompts:
    ids = torch.randint(1, 16, (1, 12))[:, :longest]
    mask = (torch.arange(1, longest) >= prompt).to(kind)[None]
    losses = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    masked_mean(losses.view_as(mask), mask).backward()
    optimizer.step()
    optimizer.zero_grad()
