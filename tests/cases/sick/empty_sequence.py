"""A record of length zero in the batch: mean pooling divides by a mask that sums to zero."""

import torch
from torch import nn


class Pool(nn.Module):
    def forward(self, hidden, mask):
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)  # origin


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pool, self.head = nn.Embedding(16, 8), Pool(), nn.Linear(8, 2)

    def forward(self, ids, mask):
        return self.head(self.pool(self.embed(ids), mask))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for lengths in ([4, 2], [3, 0]):
    ids = torch.randint(0, 16, (2, 4))
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).float()
    nn.functional.cross_entropy(model(ids, mask), torch.tensor([0, 1])).backward()
    optimizer.step()
    optimizer.zero_grad()
