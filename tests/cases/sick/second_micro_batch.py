"""Nested checkpoints, and a fault in the second of three micro-batches only: 0/0, overwritten in place.

What division keeps for backward are its two zeros, so the NaN that reaches the gradient is born there.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x, real):
        weight = self.scale(x).exp() * real[..., None]
        share = weight / weight.sum(1, keepdim=True)  # origin
        share[real == 0] = 0.0
        return share * x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Inner(), Inner()

    def forward(self, x, real):
        x = x + checkpoint(self.first, x, real, use_reentrant=False)
        return x + self.second(x, real)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(16, 4), Outer(), nn.Linear(4, 16)

    def forward(self, ids, real):
        return self.head(checkpoint(self.block, self.embed(ids), real, use_reentrant=False))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    for length in (5, 0, 3):
        ids = torch.randint(1, 16, (2, 5))
        real = torch.ones(2, 5)
        real[1, length:] = 0.0
        logits = model(ids, real)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        (losses[real.flatten() > 0].mean() / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
