"""Losses of sentence-transformers, by its Trainer: `similarity` of pairs, `ranking` in which a pair meets the others of
its batch, and the same `cached`, so that a large batch is gone through in small parts, with gradients."""

import random
import sys

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from shared import BATCH, tell, tokenizer
from transformers import BertConfig, BertModel

of_words = tokenizer()
of_words.save_pretrained("bert")
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BertModel(BertConfig(vocab_size=len(of_words), max_position_embeddings=40, **sizes, **dropout)).save_pretrained("bert")
words = models.Transformer("bert")
model = SentenceTransformer(modules=[words, models.Pooling(16)], device="cpu")
drawn = random.Random(1)


def sentence(group):
    return " ".join(f"w{5 * group + drawn.randrange(5)}" for _ in range(6))


if sys.argv[1] == "similarity":
    groups = [(drawn.randrange(8), drawn.randrange(8)) for _ in range(64)] + [(g % 8, g % 8) for g in range(64)]
    more = {"score": [float(a == b) for a, b in groups]}
else:
    groups, more = [(index % 8, index % 8) for index in range(128)], {}
pairs = {"one": [sentence(a) for a, _ in groups], "other": [sentence(b) for _, b in groups], **more}
LOSSES = {
    "similarity": losses.CosineSimilarityLoss,
    "ranking": losses.MultipleNegativesRankingLoss,
    "cached": lambda of: losses.CachedMultipleNegativesRankingLoss(of, mini_batch_size=3),
}


def error():
    """The mean squared error of the similarities of all pairs of sentences to those of their groups."""
    with torch.no_grad():
        one, other = (model.encode(pairs[name], convert_to_tensor=True) for name in ("one", "other"))
    alike = torch.tensor([[float(a == b) for _, b in groups] for a, _ in groups])
    found = torch.cosine_similarity(one[:, None], other[None], dim=-1)
    return float((found - alike).pow(2).mean())


before = error()
arguments = SentenceTransformerTrainingArguments(
    "out",
    num_train_epochs=6,
    per_device_train_batch_size=BATCH // 2,
    learning_rate=5e-3,
    save_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
)
trainer = SentenceTransformerTrainer(model, arguments, Dataset.from_dict(pairs), loss=LOSSES[sys.argv[1]](model))
trainer.train()
model.save_pretrained("final")
kept = SentenceTransformer("final", device="cpu").state_dict()
assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
tell(model, before, error())
