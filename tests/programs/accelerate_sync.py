"""Accelerate's `accumulate`, in which gradients are synchronized in one backward of three: in its own kind of loader,
whose end completes a step, too."""

import torch
from accelerate import Accelerator
from shared import BATCH, Points, tell

accelerator = Accelerator(gradient_accumulation_steps=3)
torch.manual_seed(0)
data = Points(224)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(14):
    for number, (points, classes) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            steps = number % 3 == 0 or number == len(loader)
            assert accelerator.sync_gradients == steps
            accelerator.backward(torch.nn.functional.cross_entropy(model(points), classes))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            was = model[0].weight.detach().clone()
            optimizer.step()
            schedule.step()
            assert steps or torch.equal(was, model[0].weight)
            optimizer.zero_grad()
accelerator.save_model(model, "final")
tell(accelerator.unwrap_model(model), before, data.loss(model), data)
