"""Supervised fine-tuning in which prompts do not count, by TRL's `completion_only_loss`."""

from datasets import Dataset
from shared import BATCH, Words, gpt, tell
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = Words()
names = [f"w{number}" for number in range(40)] + ["<pad>", "<eos>", "<unk>"]
tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
texts = [[names[word] for word in sentence] for sentence in words.sentences]
asked = [1 + 13 * index // len(texts) for index in range(len(texts))]
pairs = {
    "prompt": [" ".join(text[:length]) for text, length in zip(texts, asked, strict=True)],
    "completion": [" " + " ".join(text[length:]) for text, length in zip(texts, asked, strict=True)],
}
model = gpt(len(names))
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
trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer)
trainer.train()
tell(trainer.model, before, words.loss(trainer.model))
