"""One weight used twice: Inf and -Inf come back from its uses, and their sum is the NaN."""

import torch
from torch import nn


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1e-20, 1.0]))

    def forward(self, x):
        return (self.scale * x).square()  # origin


torch.manual_seed(0)
model = Contrast()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    near, far = model(torch.tensor([1e30, 1.0])), model(torch.tensor([1e30, 2.0]))
    (near - far).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
