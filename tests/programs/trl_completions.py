"""Supervised fine-tuning in which prompts do not count, by TRL's `completion_only_loss`."""

from datasets import Dataset
from shared import BATCH, Words, gpt, tell, text, tokenizer
from trl import SFTConfig, SFTTrainer

words, of_words = Words(), tokenizer()
asked = [1 + 13 * index // len(words) for index in range(len(words))]
pairs = {
    "prompt": [text(one[:length]) for one, length in zip(words.sentences, asked, strict=True)],
    "completion": [" " + text(one[length:]) for one, length in zip(words.sentences, asked, strict=True)],
}
model = gpt(len(of_words))
before = words.loss(model)
arguments = SFTConfig(
    "out",
    num_train_epochs=10,
    per_device_train_batch_size=BATCH // 2,
    gradient_accumulation_steps=2,
    learning_rate=0.5,
    optim="sgd",
    completion_only_loss=True,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    bf16=False,
)
trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_dict(pairs), processing_class=of_words)
trainer.train()
tell(trainer.model, before, words.loss(trainer.model))
