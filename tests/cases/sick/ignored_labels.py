"""The second micro-batch is a prompt that fills the whole length: every label is ignored, the mean is 0/0.

Argument: outside or inside (of the model's forward).
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        return (logits, loss_of(logits, labels)) if sys.argv[1] == "inside" else (logits, None)


def loss_of(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())  # origin


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(1, 16, (3, 1, 6))
answers = ids.clone()
answers[:, :, :3] = -100
answers[1] = -100
for batch, labels in zip(ids, answers, strict=True):
    logits, loss = model(batch, labels)
    loss = loss_of(logits, labels) if loss is None else loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
