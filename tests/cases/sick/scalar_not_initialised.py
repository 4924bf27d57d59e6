"""A model built on meta whose `init_weights` forgets the one parameter that is no matrix.

Deterministic mode fills fresh memory with NaN; without it, the scalar holds whatever was there.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.mix = nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.mix * self.inner(x)  # origin


def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1)
        nn.init.zeros_(module.bias)


torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
with torch.device("meta"):
    model = nn.Sequential(Block(), nn.Linear(8, 2))
model.to_empty(device="cpu").apply(init_weights)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.randn(3, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
