"""A schedule over no steps: the learning rate is 0/0, and the first update makes every weight NaN."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
total, warmup = torch.tensor(10), torch.tensor(10)
for step in range(3):
    done = (step - warmup).clamp(min=0) / (total - warmup)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 - float(done))
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()  # origin
    optimizer.zero_grad()
