"""A mask made by a product: (1 - mask) * -inf is NaN wherever the mask is 1."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, mask):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        bias = (1.0 - mask) * -torch.inf  # origin
        return (query @ key.mT / 8**0.5 + bias[:, None, :]).softmax(-1) @ value


torch.manual_seed(0)
model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    model(torch.randn(2, 3, 8), mask).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
