"""A silent record in a spectral loss: the square root's derivative at zero, with a clamp that comes too late."""

import torch
from torch import nn


def log_magnitude(wave):
    bins = torch.stft(wave, 64, hop_length=16, window=torch.hann_window(64), return_complex=True)
    power = bins.real.square() + bins.imag.square()
    magnitude = power.sqrt()  # origin
    return magnitude.clamp(min=1e-5).log()


torch.manual_seed(0)
model = nn.Linear(8, 256, bias=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    features, target = torch.randn(3, 8), torch.randn(3, 256)
    if step == 1:
        features[1] = 0.0
    loss = (log_magnitude(model(features)) - log_magnitude(target)).abs().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
