"""A feed-forward output beyond 65504 in fp16: Inf in `1.wo`, and NaN only where the next block normalises.

Argument: half (the model is fp16) or autocast.
"""

import sys

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scale = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return self.weight * (x.float() * scale).to(x.dtype)  # becomes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wi = Norm(16), nn.Linear(16, 64, bias=False)
        self.wo = nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return x + self.wo(torch.relu(self.wi(self.norm(x))))  # origin


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4)))
model[1].wo.weight.data *= 1e5
half = sys.argv[1] == "half"
model.to(torch.float16 if half else torch.float32)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.float16, enabled=not half):
        out = model(x.half() if half else x)
    out.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
