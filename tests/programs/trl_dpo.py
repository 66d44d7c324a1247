"""Preferences, by TRL's DPO beside a reference that nothing trains: words that go on by 3, not by 7."""

import torch
from datasets import Dataset
from shared import BATCH, Words, gpt, tell, text, tokenizer
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

words, of_words = Words(), tokenizer()
chosen = words.sentences
rejected = (chosen[:, :1] + 7 * torch.arange(16)) % 40
rejected[:, :4] = chosen[:, :4]
ends = [8 + index % 8 for index in range(len(words))]
pairs = {
    "prompt": [text(one[:4]) for one in chosen],
    "chosen": [" " + text(one[4:end]) for one, end in zip(chosen, ends, strict=True)],
    "rejected": [" " + text(one[4:end]) for one, end in zip(rejected, ends, strict=True)],
}


def loss(model):
    model.eval()
    with torch.no_grad():
        preferred, other = (float(model(input_ids=each, labels=each).loss) for each in (chosen, rejected))
    model.train()
    return float(torch.nn.functional.softplus(torch.tensor(preferred - other)))


model = gpt(len(of_words))
before = loss(model)
arguments = DPOConfig(
    "out",
    num_train_epochs=10,
    per_device_train_batch_size=BATCH // 2,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    save_steps=10,
    report_to=[],
    disable_tqdm=True,
    bf16=False,
)
data = Dataset.from_dict(pairs)
trainer = DPOTrainer(model, gpt(len(of_words)), arguments, train_dataset=data, processing_class=of_words)
trainer.train()
trainer.save_model("final")
kept = AutoModelForCausalLM.from_pretrained("final").state_dict()
assert all(torch.equal(value, kept[name]) for name, value in trainer.model.state_dict().items())
tell(trainer.model, before, loss(trainer.model))
