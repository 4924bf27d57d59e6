"""A statistic that may be NaN, and is replaced on purpose before it is used; and one that is only logged."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
logged = []
for _ in range(2):
    x, there = torch.randn(6, 4), torch.tensor([True] * 5 + [False])
    predicted = model(x).squeeze(-1)
    weight = (there.float() / there.float()).nan_to_num(0.0)
    logged.append(predicted.detach()[:0].mean())
    (weight * predicted.square()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
