"""A feature without spread was divided by its standard deviation when the data was made: NaN in one record."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
features = torch.randn(8, 4)
features[5] = (torch.ones(4) - 1) / 0
loader = DataLoader(TensorDataset(features, torch.randn(8)), batch_size=4)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = (model(x).squeeze(-1) - y).square().mean()  # origin
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
