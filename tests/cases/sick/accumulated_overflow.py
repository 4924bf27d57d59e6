"""Every micro-batch's gradient is finite; their sum in `.grad` is not."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-45)
for _ in range(2):
    for _ in range(4):
        loss = model(torch.tensor([[1.0, 1.5e38]])).sum()
        loss.backward()  # origin
    optimizer.step()
    optimizer.zero_grad()
