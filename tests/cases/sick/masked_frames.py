"""Padded frames that hold NaN, multiplied by a mask of zeros: 0 * NaN is NaN."""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, frames, mask):
        kept = frames * mask[..., None]  # origin
        return (self.inner(kept) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    frames, mask = torch.randn(2, 5, 4), torch.ones(2, 5)
    frames[1, 3:], mask[1, 3:] = torch.nan, 0.0
    model(frames, mask).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
