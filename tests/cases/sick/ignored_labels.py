"""The second micro-batch is a prompt that fills the whole length: every label is ignored, the mean is 0/0."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(1, 16, (3, 1, 6))
answers = ids.clone()
answers[:, :, :3] = -100
answers[1] = -100
for batch, labels in zip(ids, answers, strict=True):
    logits = model(batch)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())  # origin
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
