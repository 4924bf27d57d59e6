"""Advantages normalised within a group; a group of one answer has no standard deviation.

Argument: before or after (the model is called).
"""

import sys

import torch
from torch import nn


def advantages(rewards):
    spread = rewards.std()  # origin: after
    return (rewards - rewards.mean()) / (spread + 1e-4)


torch.manual_seed(0)
way = sys.argv[1]
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for answers in (4, 1):
    states, rewards = torch.randn(answers, 4), torch.randn(answers)
    weights = advantages(rewards) if way == "before" else None
    chosen = model(states).log_softmax(-1)[:, 0]
    if way == "after":
        weights = advantages(rewards)
    loss = -(chosen * weights).mean()  # origin: before
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
