"""A mixture of experts: -inf for the experts not chosen, topk and scatter, and an expert without a token."""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        nn.init.zeros_(self.router.weight)
        self.router.bias.data = torch.tensor([2.0, 1.0, 0.5, -30.0])

    def forward(self, x):
        scores = self.router(x)
        best, chosen = scores.topk(2, dim=-1)
        kept = torch.full_like(scores, -torch.inf).scatter(-1, chosen, best)
        weights, out = kept.softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).any(-1).nonzero().squeeze(-1)
            out = out.index_add(0, tokens, weights[tokens, number, None] * expert(x[tokens]))
        return x + out


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.randn(12, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
