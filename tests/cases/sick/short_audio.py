"""Connectionist temporal classification of a text that is longer than its audio: no path, so the loss is Inf."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.LogSoftmax(-1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for frames in (12, 3):
    scores = model(torch.randn(frames, 2, 4))
    text = torch.randint(1, 8, (2, 5))
    lengths = torch.tensor([frames, frames])
    loss = nn.functional.ctc_loss(scores, text, lengths, torch.tensor([5, 2]))  # origin
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
