"""Masks of the smallest number instead of -inf: what is done with them makes -inf all the same.

Argument: added (two masks in bf16), cast (a float32 mask to bf16), rounded (a score of -20 and the mask, in fp16).
"""

import sys

import torch
from torch import nn


def added(scores, causal, real):
    low = torch.finfo(scores.dtype).min
    zero = torch.zeros((), dtype=scores.dtype)
    ahead, keys, queries = (torch.where(seen, zero, low) for seen in (causal, real[:, None, :], real[:, :, None]))
    mask = ahead + keys + queries  # origin: added
    return scores + mask


def cast(scores, causal, real):
    mask = torch.zeros(scores.shape).masked_fill(~(causal & real[:, None, :]), torch.finfo(torch.float32).min)
    return scores + mask.to(scores.dtype)  # origin: cast


def rounded(scores, causal, real):
    mask = torch.zeros_like(scores).masked_fill(~(causal & real[:, None, :]), torch.finfo(scores.dtype).min)
    return scores + mask  # origin: rounded


class Attention(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.qk, self.value, self.masked = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), masked
        nn.init.eye_(self.qk.weight)

    def forward(self, x, mask):
        real = mask.bool()
        causal = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        scores = self.qk(x) @ -x.mT
        weights = self.masked(scores, causal, real).softmax(-1)  # becomes
        return weights @ self.value(x)


class Model(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.attention, self.head = Attention(masked), nn.Linear(4, 1)

    def forward(self, x, mask):
        return self.head(self.attention(x, mask))


torch.manual_seed(0)
way = sys.argv[1]
model = Model({"added": added, "cast": cast, "rounded": rounded}[way])
model.to(torch.float16 if way == "rounded" else torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.full((2, 4, 4), 2.3, dtype=model.attention.qk.weight.dtype)
mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
for _ in range(2):
    model(x, mask)[mask.bool()].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
