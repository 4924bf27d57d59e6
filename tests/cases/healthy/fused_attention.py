"""torch's own attention with a mask that leaves rows without a key: it returns zeros there since 2.5."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "qkv": nn.Linear(8, 24), "head": nn.Linear(8, 16)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.tensor([[3, 4, 5, 6, 7, 8], [0, 0, 9, 10, 11, 12]])
seen = torch.ones(6, 6).tril().bool() & (ids != 0)[:, None, :]
infinite = torch.zeros(2, 6, 6).masked_fill(~seen, -torch.inf)
for mask in (seen, infinite):
    query, key, value = (part[:, None] for part in model["qkv"](model["embed"](ids)).chunk(3, dim=-1))
    hidden = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])[:, 0]
    labels = ids[:, 1:].masked_fill(ids[:, :-1] == 0, -100)
    nn.functional.cross_entropy(model["head"](hidden)[:, :-1].flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
