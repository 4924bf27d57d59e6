"""Three heads, one of which has no example in the batch: its mean is 0/0, and a weight of 0 does not help."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.ModuleDict({task: nn.Linear(8, 1) for task in ("pitch", "pace", "style")})

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return {task: head(hidden).squeeze(-1) for task, head in self.heads.items()}


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weights = {"pitch": 1.0, "pace": 1.0, "style": 0.0}
for _ in range(2):
    x, target = torch.randn(6, 4), torch.randn(6)
    there = {"pitch": torch.arange(6) < 3, "pace": torch.arange(6) >= 3, "style": torch.arange(6) > 9}
    total = torch.zeros(())
    for task, predicted in model(x).items():
        errors = (predicted - target).square()[there[task]]
        total = total + weights[task] * errors.mean()  # origin
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
