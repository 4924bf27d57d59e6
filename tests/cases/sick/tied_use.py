"""An embedding that is also the head, with a zero row for padding: normalised by its length, the row's derivative
is 0/0. Argument: head (the head normalises its rows) or lookup (the looked-up vectors are normalised)."""

import sys

import torch
from torch import nn

way = sys.argv[1]


def unit(x):
    length = x.square().sum(-1, keepdim=True).sqrt()  # origin
    return x / length.clamp(min=1e-6)


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(x, unit(self.weight) if way == "head" else self.weight)


class Lookup(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.embed = embed

    def forward(self, ids):
        x = self.embed(ids)
        return unit(x) if way == "lookup" else x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        embed = nn.Embedding(16, 8)
        embed.weight.data[0] = 0.0
        self.lookup, self.inner, self.head = Lookup(embed), nn.Linear(8, 8), Head(embed.weight)

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.lookup(ids))))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.tensor([[3, 4, 5, 6, 0, 0]])
for _ in range(2):
    loss = nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:], ignore_index=0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
