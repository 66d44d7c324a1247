"""A loop of one's own with Accelerate; with the argument `bf16` in mixed precision."""

import sys

import torch
from accelerate import Accelerator
from shared import BATCH, Points, tell

precision = "bf16" if "bf16" in sys.argv else "no"
accelerator = Accelerator(mixed_precision=precision)
torch.manual_seed(0)
data = Points()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * len(loader))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(8):
    for points, classes in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(points), classes))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    accelerator.save_state(f"checkpoints/{epoch}")
if accelerator.is_main_process:
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "final.pt")
torch.load("final.pt")
accelerator.load_state("checkpoints/7")
tell(accelerator.unwrap_model(model), before, data.loss(model), data)
