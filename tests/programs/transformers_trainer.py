from shared import BATCH, Words, gpt, tell
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

data, model = Words(), gpt()
before = data.loss(model)
arguments = TrainingArguments(
    "out",
    num_train_epochs=12,
    per_device_train_batch_size=BATCH // 2,
    learning_rate=5e-3,
    save_steps=40,
    save_total_limit=2,
    eval_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=Words(32, seed=2))
trainer.train()
trainer.save_model("final")
GPT2LMHeadModel.from_pretrained("final")
tell(model, before, data.loss(model), data, rate=trainer.lr_scheduler.get_last_lr()[0])
