"""A function whose backward writes the gradient of whole blocks only: the rest of its fresh memory is read.

Deterministic mode fills fresh memory with NaN; without it, the rest holds whatever was there.
"""

import torch
from torch import nn

BLOCK = 4


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        whole = grad.shape[0] // BLOCK * BLOCK
        out[:whole] = 2 * grad[:whole]
        return out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return Blocks.apply(self.inner(x))  # origin


torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = nn.Sequential(Layer(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (8, 6):
    model(torch.randn(rows, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
