"""Rows without a gradient, and an epsilon that is zero in the parameters' precision: 0/0 in the update.

Argument: foreach or loop (fp16, where 1e-8 is zero), zero (float32 and eps=0).
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
way = sys.argv[1]
model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
if way != "zero":
    model.half()
eps = 0.0 if way == "zero" else 1e-8
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps, foreach=way == "foreach", weight_decay=0.0)
for _ in range(2):
    ids = torch.tensor([[1, 2, 3, 1]])
    loss = nn.functional.cross_entropy(model(ids)[0, :-1].float(), ids[0, 1:])
    loss.backward()
    optimizer.step()  # origin
    optimizer.zero_grad()
