"""An entropy written out: a saturated probability is 0, its logarithm -Inf, and 0 times -Inf is NaN."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for scale in (1.0, 1e3):
    chances = model(torch.randn(5, 4) * scale).softmax(-1)
    surprise = chances.log()  # origin
    loss = (chances * surprise).sum(-1).mean()  # becomes
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
