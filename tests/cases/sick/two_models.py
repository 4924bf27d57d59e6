"""A generator and a critic with an optimizer each; the critic's score of the generated half is a logarithm of 0."""

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return torch.sigmoid(self.outer(torch.relu(self.inner(x))))


torch.manual_seed(0)
model = nn.ModuleDict({"generator": nn.Linear(2, 4), "critic": Critic()})
slow = torch.optim.SGD(model["generator"].parameters(), lr=0.01)
fast = torch.optim.SGD(model["critic"].parameters(), lr=0.01)
for size in (1.0, 1e4):
    real, noise = torch.randn(6, 4), torch.randn(6, 2) * size
    made = model["generator"](noise)
    scores = model["critic"](real), model["critic"](made.detach())
    (-(scores[0].log() + (1.001 - scores[1]).log()).mean()).backward()
    fast.step()
    fast.zero_grad()
    chance = model["critic"](made)
    (-chance.log().mean()).backward()  # origin
    slow.step()
    model.zero_grad()
