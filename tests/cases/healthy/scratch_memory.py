"""Fresh memory that is written before it is read, under deterministic mode, which fills it with NaN at first."""

import torch
from torch import nn


class Pack(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("cache", torch.empty(8, 4), persistent=False)
        self.cache.zero_()

    def forward(self, x):
        packed = torch.empty(8, 4)
        packed[:4], packed[4:] = x[0], x[1]
        scores = x.new_empty(8).fill_(1.0)
        self.cache.copy_(packed)
        return self.inner(packed + self.cache) * scores[:, None]


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        torch.mul(x, 2, out=out)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        out[:4], out[4:] = 2 * grad[:4], 2 * grad[4:]
        return out


torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = Pack()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    Blocks.apply(model(torch.randn(2, 4, 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
