"""Accelerate's ways to divide batches, for a number of samples that does not divide: `dispatch`, `split`, `uneven`."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from shared import BATCH, Points, tell

HOW = {
    "dispatch": {"dispatch_batches": True},
    "split": {"split_batches": True},
    "uneven": {"even_batches": False},
}
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**HOW[sys.argv[1]], use_seedable_sampler=True))
torch.manual_seed(0)
data, held_out = Points(250), Points(37, seed=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
evaluation = torch.utils.data.DataLoader(held_out, 8)
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
for epoch in range(8):
    model.train()
    with accelerator.join_uneven_inputs([model]):
        for points, classes in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(points), classes))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(points).argmax(1), classes)) for points, classes in evaluation]
    assert sum(len(classes) for _, classes in found) == len(held_out)
    accelerator.save_state(f"checkpoints/{epoch}")
accelerator.load_state("checkpoints/7")
tell(accelerator.unwrap_model(model), before, data.loss(model), data)
