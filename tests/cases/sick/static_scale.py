"""A loss scale that never falls, in fp16: the gradient overflows on its way back, and unscaling keeps the Inf."""

import torch
from torch import nn

SCALE = 65536.0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    predicted = model(torch.ones(4, 8).half())
    loss = (predicted.float() - 20.0).square().mean()  # origin
    (loss * SCALE).backward()
    for parameter in model.parameters():
        parameter.grad /= SCALE
    optimizer.step()
    optimizer.zero_grad()
