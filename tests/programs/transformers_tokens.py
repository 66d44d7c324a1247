"""Prompts of several lengths do not count in the loss; with the argument `accumulating`, of two backwards a step."""

import sys

import torch
from shared import BATCH, Words, gpt, tell
from transformers import Trainer, TrainingArguments


class Answers(Words):
    def __getitem__(self, index):
        found = super().__getitem__(index)
        labels = found["labels"].clone()
        labels[: 1 + 13 * index // len(self)] = -100
        return {**found, "labels": labels}


data, model = Answers(), gpt()
before = data.loss(model)
backwards = 2 if "accumulating" in sys.argv else 1
arguments = TrainingArguments(
    "out",
    num_train_epochs=12,
    per_device_train_batch_size=BATCH // 2,
    gradient_accumulation_steps=backwards,
    learning_rate=0.5,
    optim="sgd",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
assert torch.isfinite(next(model.parameters())).all()
tell(model, before, data.loss(model), data)
