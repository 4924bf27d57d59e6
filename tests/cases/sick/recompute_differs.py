"""A routed block draws which tokens it keeps; checkpointing does not restore the generator, so the recomputation
draws again and keeps none: 0/0 there, while the forward pass was finite. Argument: on or reentrant."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        keep = (torch.rand(x.shape[1], 1) < 0.2).float()
        share = keep / keep.sum()  # origin
        return x + share * self.inner(x)


torch.manual_seed(12)
model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "block": Routed(), "head": nn.Linear(4, 8)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    ids = torch.randint(0, 8, (1, 6))
    hidden = model["embed"](ids)
    reentrant = sys.argv[1] == "reentrant"
    hidden = checkpoint(model["block"], hidden, use_reentrant=reentrant, preserve_rng_state=False)
    loss = nn.functional.cross_entropy(model["head"](hidden)[0, :-1], ids[0, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
