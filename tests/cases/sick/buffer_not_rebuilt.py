"""A model built on meta and filled from a checkpoint: the rotary table is in no checkpoint and stays unwritten.

Deterministic mode fills fresh memory with NaN; without it, the table holds whatever was there.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1 / 100 ** (torch.arange(4) / 4), persistent=False)

    def forward(self, x):
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq  # origin
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rotary, self.head = nn.Embedding(16, 8), Rotary(), nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.rotary(self.embed(ids)))


torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
checkpoint = Model().state_dict()
with torch.device("meta"):
    model = Model()
model.to_empty(device="cpu")
model.load_state_dict(checkpoint, strict=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, 16, (2, 6))
for _ in range(2):
    loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
