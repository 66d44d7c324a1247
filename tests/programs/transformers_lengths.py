"""Sentences of several lengths, of which transformers' Trainer puts those of about the same length into a batch."""

from shared import BATCH, Words, gpt, tell
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments


class Lengths(Words):
    def __getitem__(self, index):
        length = 4 + 7 * index % 13
        words = self.sentences[index, :length]
        return {"input_ids": words, "labels": words, "index": int(index)}


def padded(samples):
    data.read += [sample["index"] for sample in samples]  # not as they are read: the sampler asks each for its length
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
    remove_unused_columns=False,
    save_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, data_collator=padded)
trainer.train()
trainer.save_model("final")
tell(model, before, data.loss(model), data)
