"""Optional inputs that are absent: tensors without an element, a head whose loss is an honest zero, ignored labels."""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image, self.head, self.extra = (
            nn.Embedding(16, 8),
            nn.Linear(4, 8),
            nn.Linear(8, 16),
            nn.Linear(8, 2),
        )

    def forward(self, ids, image):
        hidden = torch.cat([self.image(image), self.text(ids)], dim=1)
        return self.head(hidden[:, image.shape[1] :]), self.extra(hidden)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for valid in (4, 0):
    ids = torch.randint(0, 16, (2, 6))
    labels = ids.masked_fill(torch.arange(6) >= valid, -100)
    logits, extra = model(ids, torch.empty(2, 0, 4))
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = total / (labels != -100).sum().clamp(min=1) + 0.0 * extra.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
