"""Supervised fine-tuning by TRL: with the argument `packed` of texts that are joined to sequences of one length, with
`bfd` of whole texts that are packed together where they fit best, which is how TRL packs by default."""

import sys

from datasets import Dataset
from shared import BATCH, Words, gpt, tell, text, tokenizer
from trl import SFTConfig, SFTTrainer

words, of_words = Words(), tokenizer()
packing = {"packed": "wrapped", "bfd": "bfd"}.get(sys.argv[-1])
lengths = [16 - 5 * (packing is not None) * (index % 2) for index in range(len(words))]
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
    **({"packing": True, "packing_strategy": packing, "max_length": 24} if packing else {}),
)
trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=of_words)
trainer.train()
trainer.save_model("final")
tell(trainer.model, before, words.loss(trainer.model))
