"""Every gradient is finite and large; the square of the total norm is not, and clipping makes all of them zero."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    loss = model(torch.ones(2, 4)).sum() * 3e19
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # origin
    optimizer.step()
    optimizer.zero_grad()
