"""Supervised fine-tuning by TRL, with the argument `packed` of texts that are joined to sequences of one length."""

import sys

from datasets import Dataset
from shared import BATCH, Words, gpt, tell, text, tokenizer
from trl import SFTConfig, SFTTrainer

words, of_words = Words(), tokenizer()
packed = "packed" in sys.argv
lengths = [16 - 5 * packed * (index % 2) for index in range(len(words))]
texts = [text(sentence[:length]) for sentence, length in zip(words.sentences, lengths, strict=True)]
model = gpt(len(of_words))
before = words.loss(model)
arguments = SFTConfig(
    "out",
    num_train_epochs=10,
    per_device_train_batch_size=BATCH // 2,
    learning_rate=5e-3,
    save_steps=40,
    report_to=[],
    disable_tqdm=True,
    bf16=False,
    **({"packing": True, "packing_strategy": "wrapped", "max_length": 24} if packed else {}),
)
trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=of_words)
trainer.train()
trainer.save_model("final")
tell(trainer.model, before, words.loss(trainer.model))
