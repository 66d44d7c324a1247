"""A Trainer that pushes each checkpoint to a Hub, and logs to Weights & Biases (offline) and TensorBoard; then pushes
the model and its tokenizer by hand."""

from shared import BATCH, Words, gpt, tell, tokenizer
from transformers import GenerationConfig, Trainer, TrainerCallback, TrainingArguments


class Generates(TrainerCallback):
    """Completes a text after each evaluation."""

    def __init__(self):
        self.texts = []

    def on_evaluate(self, args, state, control, model, **_):
        words = data.sentences[:1, :4]
        done = model.generate(
            words, generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
        )
        self.texts.append(done[0].tolist())


data, model, generates = Words(), gpt(), Generates()
before = data.loss(model)
arguments = TrainingArguments(
    "out",
    num_train_epochs=8,
    per_device_train_batch_size=BATCH // 2,
    learning_rate=5e-3,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    load_best_model_at_end=True,
    push_to_hub=True,
    hub_model_id="me/tiny",
    hub_always_push=True,
    report_to=["wandb", "tensorboard"],
    logging_steps=5,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=Words(32, seed=2), callbacks=[generates])
trainer.train()
trainer.push_to_hub("trained", blocking=True)
tokenizer().push_to_hub("words", commit_message="words")
losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
found = {"losses": losses, "texts": generates.texts, "best": trainer.state.best_global_step}
tell(model, before, data.loss(model), data, **found)
