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
texts = [" ".join(names[word] for word in sentence) for sentence in words.sentences]
model = gpt(len(names))
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
)
trainer = SFTTrainer(
    model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
)
trainer.train()
trainer.save_model("final")
tell(trainer.model, before, words.loss(trainer.model))
