"""Rows without a key, done right: the scores of such a row are set to zero before softmax, its output after."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, ids):
        real = ids != 0
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool() & real[:, None, :]
        empty = ~seen.any(-1, keepdim=True)
        scores = (query @ key.mT / 8**0.5).masked_fill(~seen, -torch.inf).masked_fill(empty, 0.0)
        return (scores.softmax(-1).masked_fill(empty, 0.0) @ value).masked_fill(~real[..., None], 0.0)


torch.manual_seed(0)
model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "attention": Attention(), "head": nn.Linear(8, 16)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.tensor([[3, 4, 5, 6, 7, 8], [0, 0, 9, 10, 11, 12]])
for _ in range(2):
    hidden = model["attention"](model["embed"](ids), ids)
    labels = ids[:, 1:].masked_fill(ids[:, :-1] == 0, -100)
    nn.functional.cross_entropy(model["head"](hidden)[:, :-1].flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
