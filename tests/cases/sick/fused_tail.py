"""What a fused attention kernel did at length % 128 == 64, as an autograd function: its backward fills the last
tile with rows whose logsumexp is 0 - lse, and multiplies an overflow by zero. The output is right."""

import torch
from torch import nn

TILE = 128


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        scores = query @ key.mT
        lse = scores.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(query, key, value, lse)
        return (scores - lse).exp() @ value

    @staticmethod
    def backward(ctx, grad):
        query, key, value, lse = ctx.saved_tensors
        tail = -key.shape[1] % TILE
        scores = nn.functional.pad(query @ key.mT, (0, tail))
        weights = (scores - lse).exp()  # origin
        inner = nn.functional.pad(grad @ value.mT, (0, tail))
        d_scores = weights * (inner - (grad * (weights[..., : key.shape[1]] @ value)).sum(-1, keepdim=True))
        d_scores = d_scores[..., : key.shape[1]] + 0 * d_scores.sum(-1, keepdim=True)
        return d_scores @ key, d_scores.mT @ query, weights[..., : key.shape[1]].mT @ grad


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return Fused.apply(self.query(x), self.key(x), self.value(x))


torch.manual_seed(0)
model = nn.Sequential(Attention(), nn.Linear(8, 1))
for linear in (model[0].query, model[0].key):
    nn.init.eye_(linear.weight)
model[0].key.weight.data.neg_()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for length in (128, 192):
    x = torch.full((1, length, 8), 4.0) + torch.randn(1, length, 8) / 8
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
