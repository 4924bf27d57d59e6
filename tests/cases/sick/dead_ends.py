"""Many bad values that are thrown away, whose memory is used again, and then one that is not."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(50):
            dead = (x.detach() * 0).log()
            dead = (dead - dead).masked_fill(dead.isinf(), torch.nan)
            kept = dead.nan_to_num(0.0)
            del dead
            x = x + kept
        return self.inner(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        hidden = self.first(x)
        ratio = hidden / (hidden - hidden.detach())  # origin
        return self.second(hidden) * ratio.clamp(max=1.0)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
