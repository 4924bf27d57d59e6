"""A standardised feature without an epsilon: a row of equal values has no variance, and 0/0 is NaN."""

import torch
from torch import nn


class Standard(nn.Module):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / x.var(-1, keepdim=True).sqrt()  # origin


torch.manual_seed(0)
model = nn.Sequential(Standard(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(3, 4)
x[2] = 0.5
for _ in range(2):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
