"""Advantages normalised within a group; a group of one answer has no standard deviation."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for answers in (4, 1):
    states, rewards = torch.randn(answers, 4), torch.randn(answers)
    spread = rewards.std()  # origin
    advantages = (rewards - rewards.mean()) / (spread + 1e-4)
    chosen = model(states).log_softmax(-1)[:, 0]
    loss = -(chosen * advantages).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
