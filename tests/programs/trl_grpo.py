"""Reinforcement learning by TRL's GRPO, which generates in mid-training: even words are rewarded. With the argument
`reusing` each generation is divided among two steps and used twice."""

import sys

import torch
from datasets import Dataset
from shared import BATCH, Words, gpt, tell, text, tokenizer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

words, of_words = Words(64), tokenizer()
words.read = read = []


def even(completions, index, **_):
    read.extend(index)
    lists = [[int(word[1:]) for word in completion.split() if word[1:].isdigit()] for completion in completions]
    return [sum(word % 2 == 0 for word in each) / 8 for each in lists]


def loss(model):
    """How unlikely even words are."""
    model.eval()
    with torch.no_grad():
        likely = torch.softmax(model(input_ids=words.sentences[:, :4]).logits, -1)
    model.train()
    return float(-likely[..., 0:40:2].sum(-1).log().mean())


model = gpt(len(of_words))
before = loss(model)
arguments = GRPOConfig(
    "out",
    num_train_epochs=4,
    per_device_train_batch_size=BATCH,
    num_generations=4,
    max_completion_length=8,
    learning_rate=1e-2,
    beta=0.0,
    save_steps=20,
    report_to=[],
    disable_tqdm=True,
    bf16=False,
    **({"steps_per_generation": 2, "num_iterations": 2} if "reusing" in sys.argv else {}),
)
prompts = {"prompt": [text(one[:4]) for one in words.sentences], "index": list(range(len(words)))}
trainer = GRPOTrainer(model, even, args=arguments, train_dataset=Dataset.from_dict(prompts), processing_class=of_words)
trainer.train()
trainer.save_model("final")
kept = AutoModelForCausalLM.from_pretrained("final").state_dict()
assert all(torch.equal(value, kept[name]) for name, value in trainer.model.state_dict().items())
tell(trainer.model, before, loss(trainer.model), words)
