"""Left padding and a causal mask leave rows without a key; the NaN is zeroed, so the loss is finite.

Backward multiplies the NaN that softmax saved by zero. Argument: off, on or reentrant (checkpointing).
"""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, ids):
        real = ids != 0
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool() & real[:, None, :]
        scores = (query @ key.mT / 8**0.5).masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1)  # origin
        return (weights @ value).masked_fill(~real[..., None], 0.0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            again = kind == "reentrant"
            x = x + (layer(x, ids) if kind == "off" else checkpoint(layer, x, ids, use_reentrant=again))
        return self.head(x)


torch.manual_seed(0)
kind = sys.argv[1]
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.tensor([[3, 4, 5, 6, 7, 8], [0, 0, 9, 10, 11, 12]])
for _ in range(2):
    logits = model(ids)[:, :-1]
    labels = ids[:, 1:].masked_fill(ids[:, :-1] == 0, -100)
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
