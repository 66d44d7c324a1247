"""Sentences of several lengths, of which transformers' Trainer puts those of about the same length into a batch."""

from shared import BATCH, Words, gpt, tell
from transformers import Trainer, TrainingArguments


class Lengths(Words):
    def __getitem__(self, index):
        length = 4 + 7 * index % 13
        return {name: each[:length] for name, each in super().__getitem__(index).items()}


def padded(samples):
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


data, model = Lengths(), gpt()
before = data.loss(model)
arguments = TrainingArguments(
    "out",
    num_train_epochs=8,
    per_device_train_batch_size=BATCH // 2,
    learning_rate=5e-3,
    train_sampling_strategy="group_by_length",
    save_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, data_collator=padded)
data.read.clear()  # the sampler asks each for its length
trainer.train()
trainer.save_model("final")
tell(model, before, data.loss(model), data)
