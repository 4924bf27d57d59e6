"""bf16 and fp16 near their limits: masks of the smallest number, a clamp before the cast, an epsilon that is there."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mask = torch.zeros(6, 6, dtype=x.dtype).masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(x.dtype).min)
        out = (query @ key.mT / 8**0.5 + mask).softmax(-1) @ value
        return x + (out.float() * 1e3).clamp(-1e4, 1e4).to(x.dtype)


torch.manual_seed(0)
for dtype in (torch.bfloat16, torch.float16):
    model = nn.Sequential(Block(), Block()).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    for _ in range(2):
        model(torch.randn(2, 6, 8).to(dtype)).float().sin().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
