"""An embedding with sparse gradients whose vectors are normalised by their length: one of them is zero."""

import torch
from torch import nn


class Unit(nn.Module):
    def forward(self, x):
        length = x.square().sum(-1, keepdim=True).sqrt()  # origin
        return x / (length + 1e-6)


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8, sparse=True), Unit(), nn.Linear(8, 2))
model[0].weight.data[0] = 0.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for ids in ([3, 4, 5], [6, 0, 7]):
    nn.functional.cross_entropy(model(torch.tensor(ids)), torch.tensor([0, 1, 0])).backward()
    optimizer.step()
    optimizer.zero_grad()
