"""Rows packed into scratch memory of which the last are never written, and read all the same.

Deterministic mode fills fresh memory with NaN; without it, the rows hold whatever was there.
"""

import torch
from torch import nn


class Pack(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, lengths):
        packed = torch.empty(8, 4)
        rows = torch.cat([sample[:length] for sample, length in zip(x, lengths, strict=True)])
        packed[: len(rows)] = rows
        return self.inner(packed)  # origin


torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = Pack()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for lengths in ([4, 4], [4, 3]):
    model(torch.randn(2, 4, 4), lengths).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
