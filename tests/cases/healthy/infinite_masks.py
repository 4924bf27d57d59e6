"""Causal masks of -inf, made in three ways, and no row without a key."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), mask

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return x + (query @ key.mT / 8**0.5 + self.mask).softmax(-1) @ value


torch.manual_seed(0)
full = torch.full((6, 6), -torch.inf).triu(1)
filled = torch.zeros(6, 6).masked_fill_(torch.ones(6, 6).triu(1).bool(), -torch.inf)
chosen = torch.where(torch.ones(6, 6).tril().bool(), torch.zeros(()), -torch.inf)
model = nn.Sequential(nn.Embedding(16, 8), *(Attention(mask) for mask in (full, filled, chosen)), nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    ids = torch.randint(0, 16, (2, 6))
    nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
