"""A weight kept as length and direction, whose direction is zero: 0/0 when the weight is made."""

import torch
from torch import nn
from torch.nn.utils import parametrize


class Direction(nn.Module):
    def __init__(self):
        super().__init__()
        self.length = nn.Parameter(torch.ones(4, 1))

    def forward(self, weight):
        return self.length * weight / weight.norm(dim=1, keepdim=True)  # origin


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
model[0].weight.data[2] = 0.0
parametrize.register_parametrization(model[0], "weight", Direction())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
