"""Gradients accumulated over batches whose sentences have several lengths, so that each token counts alike: the loss
is a sum, divided by the tokens of all batches of a step."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from shared import BATCH, Words, gpt, tell

STEPS = 2
accelerator = Accelerator(gradient_accumulation_steps=STEPS)


class Lengths(Words):
    def __getitem__(self, index):
        found = super().__getitem__(index)
        labels = found["labels"].clone()
        labels[3 + 7 * index % 13 :] = -100
        return {**found, "labels": labels}


data, model = Lengths(), gpt()
before = data.loss(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = torch.utils.data.DataLoader(data, BATCH // 2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(8):
    batches = iter(loader)
    for _ in range(len(loader) // STEPS):
        taken = [next(batches) for _ in range(STEPS)]
        counted = accelerator.gather(sum((batch["labels"][:, 1:] != -100).sum() for batch in taken)).sum().item()
        for number, batch in enumerate(taken, 1):
            with accelerator.no_sync(model) if number < STEPS else nullcontext():
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
                labels = batch["labels"][:, 1:].flatten()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
                accelerator.backward(loss * accelerator.num_processes * STEPS / counted)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_model(model, "final")
tell(accelerator.unwrap_model(model), before, data.loss(model), data)
