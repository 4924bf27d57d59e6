"""Rows without a key again; the -Inf of the mask was not made by the attention.

Argument: buffer (a mask that the model keeps), batch (it comes with the batch), indexed (written by index).
"""

import sys

import torch
from torch import nn

way = sys.argv[1]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("ahead", torch.full((6, 6), -torch.inf).triu(1))

    def forward(self, x, real, mask):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.mT / 8**0.5
        if way == "buffer":
            scores = torch.where(real[:, None, :].bool(), scores + self.ahead, -torch.inf)
        elif way == "batch":
            scores = scores + mask
        else:
            scores[mask.isinf()] = -torch.inf
        weights = scores.softmax(-1)  # origin
        return (weights @ value) * real[..., None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(16, 8), Attention(), nn.Linear(8, 16)

    def forward(self, ids, real, mask):
        return self.head(self.attention(self.embed(ids), real, mask))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.tensor([[3, 4, 5, 6, 7, 8], [0, 0, 9, 10, 11, 12]])
real = (ids != 0).float()
mask = torch.zeros(2, 6, 6).masked_fill(~(torch.ones(6, 6).tril().bool() & (ids != 0)[:, None, :]), -torch.inf)
for _ in range(2):
    logits = model(ids, real, mask)[:, :-1]
    labels = ids[:, 1:].masked_fill(ids[:, :-1] == 0, -100)
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
