"""Mixed precision in fp16 whose scaler starts too high: it skips the first steps, as it should."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
for _ in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(torch.ones(4, 8)).float() - 3.0).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
