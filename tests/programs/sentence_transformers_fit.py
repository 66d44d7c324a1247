import random

import torch
from sentence_transformers import InputExample, SentenceTransformer, losses, models
from shared import BATCH, tell
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{number}" for number in range(40)]
tokenizer = Tokenizer(tokenizer_models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **special).save_pretrained("bert")
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BertModel(BertConfig(vocab_size=len(names), max_position_embeddings=40, **sizes, **dropout)).save_pretrained("bert")
words = models.Transformer("bert")
model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu")
drawn = random.Random(1)


def sentence(group):
    return " ".join(f"w{20 * group + drawn.randrange(20)}" for _ in range(6))


pairs = [(drawn.randrange(2), drawn.randrange(2)) for _ in range(128)]
examples = [InputExample(texts=[sentence(a), sentence(b)], label=float(a == b)) for a, b in pairs]


def error():
    """The mean squared error of the similarities."""
    with torch.no_grad():
        first, second = (model.encode([e.texts[i] for e in examples], convert_to_tensor=True) for i in (0, 1))
    labels = torch.tensor([e.label for e in examples])
    return float((torch.cosine_similarity(first, second) - labels).pow(2).mean())


before = error()
loader = torch.utils.data.DataLoader(examples, shuffle=True, batch_size=BATCH // 2)
objective = [(loader, losses.CosineSimilarityLoss(model))]
model.fit(
    objective, epochs=8, warmup_steps=0, optimizer_params={"lr": 5e-3}, show_progress_bar=False, output_path="out"
)
SentenceTransformer("out", device="cpu")
tell(model, before, error())
