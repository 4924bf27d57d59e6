"""A learning rate that is far too large: every step makes the weights bigger, until the error's square overflows."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
x, y = torch.randn(16, 4), torch.randn(16)
for _ in range(40):
    error = model(x).squeeze(-1) - y
    loss = error.square().mean()  # origin
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
