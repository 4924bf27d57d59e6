"""The input of the singular operation is chosen first, so that both branches have a derivative."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(3, 4)
x[1] = 0.0
for _ in range(2):
    energy = model(x).square()
    there = energy > 0
    loudness = torch.where(there, torch.where(there, energy, 1.0).log(), torch.zeros(()))
    dead = torch.where(there, torch.zeros(()), (1 / energy.detach()).log())
    (loudness + dead.clamp(max=0.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
