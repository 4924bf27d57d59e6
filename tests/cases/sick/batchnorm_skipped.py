"""A batch with NaN is skipped for its loss, and the running statistics of batch normalisation keep it."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(8, 4)
    if step == 1:
        x[3, 0] = torch.nan
    loss = model(x).square().mean()  # origin
    if not torch.isfinite(loss):
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
