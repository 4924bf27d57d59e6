"""Four codebooks, each with its own mean: in the second batch one of them has no label at all."""

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, CODES = 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(CODES, 16) for _ in range(CHANNELS))
        self.trunk = nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Linear(16, CODES) for _ in range(CHANNELS))

    def forward(self, codes):
        hidden = self.trunk(sum(embed(codes[..., c]) for c, embed in enumerate(self.embed)))
        return [head(hidden) for head in self.heads]


def channel_loss(logits, labels):
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    valid = (labels.flatten() != -100).float()
    return (losses * valid).sum() / valid.sum()  # origin


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    codes = torch.randint(0, CODES, (2, 5, CHANNELS))
    labels = codes.clone()
    if step == 1:
        labels[..., 2] = -100
    losses = [channel_loss(logits, labels[..., c]) for c, logits in enumerate(model(codes))]
    sum(weight * loss for weight, loss in zip((1.0, 2.0, 2.0, 2.0), losses, strict=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
