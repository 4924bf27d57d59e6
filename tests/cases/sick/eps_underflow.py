"""A norm computed in fp16 with an epsilon of 1e-9, which is zero there: a padded position divides by zero."""

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scale = (x.square().mean(-1, keepdim=True) + 1e-9).rsqrt()  # origin
        return self.weight * (x * scale)  # becomes


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        self.norm, self.head = Norm(8), nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


torch.manual_seed(0)
model = Model().half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
ids = torch.tensor([[3, 4, 5, 0]])
for _ in range(2):
    nn.functional.cross_entropy(model(ids)[0, :-1].float(), ids[0, 1:], ignore_index=0).backward()
    optimizer.step()
    optimizer.zero_grad()
