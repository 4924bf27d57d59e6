"""Adam in fp16 on the gradients of a scaled loss: the square overflows in the state, the parameters stay finite."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4, foreach=True)
for _ in range(3):
    loss = model(torch.ones(2, 4).half()).float().sum() * 16384
    loss.backward()
    optimizer.step()  # origin
    optimizer.zero_grad()
