"""Dropout under both kinds of checkpointing, over two micro-batches a step."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.inner(self.norm(x)))


torch.manual_seed(0)
model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "first": Block(), "second": Block(), "head": nn.Linear(8, 16)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    for _ in range(2):
        ids = torch.randint(0, 16, (2, 6))
        hidden = checkpoint(model["first"], model["embed"](ids), use_reentrant=True)
        hidden = checkpoint(model["second"], hidden, use_reentrant=False)
        loss = nn.functional.cross_entropy(model["head"](hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
