"""Batch normalisation in training and then in evaluation, beside a frozen half of the model and a hard clamp."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    model.train(step < 2)
    loss = model(torch.randn(8, 4) * 1e4).clamp(-1e3, 1e3).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
