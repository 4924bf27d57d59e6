"""A gate that starts at zero, under a square root: its gradient is Inf, and no NaN comes of it."""

import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.strength = nn.Parameter(torch.tensor([1.0, 0.25, 0.0, 1.0]))

    def forward(self, x):
        return x * self.strength.sqrt()  # origin


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Gate())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.ones(3, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
