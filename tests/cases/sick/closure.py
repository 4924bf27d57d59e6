"""An optimizer that calls the model itself: the logarithm is in the loss of its closure, not in its own arithmetic."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=5.0, max_iter=4)
x, y = torch.randn(8, 4), torch.rand(8)
model.bias.data.fill_(2.0)
model.weight.data *= 0.1


def closure():
    optimizer.zero_grad()
    rate = model(x).squeeze(-1)
    loss = (rate - y * rate.log()).mean()  # origin
    loss.backward()
    return loss


for _ in range(6):
    optimizer.step(closure)
