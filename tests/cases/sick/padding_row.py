"""A checkpoint with NaN in the padding token's row of the embedding; the first padded batch brings it in."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        pooled = self.embed(ids).mean(dim=1)  # origin
        return self.head(pooled)


torch.manual_seed(0)
model = Model()
checkpoint = model.state_dict()
checkpoint["embed.weight"][0] = torch.nan
model.load_state_dict(checkpoint)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in ([[3, 4, 5, 6]], [[7, 8, 0, 0]]):
    loss = nn.functional.cross_entropy(model(torch.tensor(ids)), torch.tensor([1]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
