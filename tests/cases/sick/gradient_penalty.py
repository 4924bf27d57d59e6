"""A penalty on the length of the critic's gradient, which is zero for a dead input: backward goes through the
gradient itself, and meets a root at zero."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
model[0].bias.data.fill_(-1.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for size in (10.0, 0.01):
    x = (torch.randn(6, 4) * size).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    length = slope.square().sum(-1).sqrt()  # origin
    penalty = (length - 1).square().mean()
    (penalty + model(x.detach()).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
