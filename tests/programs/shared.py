"""What the programs of this folder have in common: data, and what they tell of a training as one line of JSON."""

import hashlib
import json
import os

import torch

torch.set_num_threads(1)
BATCH = int(os.environ.get("BATCH", "8"))


class Points(torch.utils.data.Dataset):
    """Two classes of points. It remembers which were read."""

    def __init__(self, number=256, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(number, 8, generator=generator)
        self.classes = (self.points.sum(1) > 0).long()
        self.read = []

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        self.read.append(int(index))
        return self.points[index], self.classes[index]

    def loss(self, model):
        """Of all points."""
        model.eval()
        with torch.no_grad():
            found = float(torch.nn.functional.cross_entropy(model(self.points), self.classes))
        model.train()
        return found


class Words(torch.utils.data.Dataset):
    """Sentences of 16 words, of which the next follows from the last."""

    def __init__(self, number=128, seed=1):
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, 40, (number, 1), generator=generator)
        self.sentences = (starts + 3 * torch.arange(16)) % 40
        self.read = []

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        self.read.append(int(index))
        return {"input_ids": self.sentences[index], "labels": self.sentences[index]}

    def loss(self, model):
        model.eval()
        with torch.no_grad():
            found = float(model(input_ids=self.sentences, labels=self.sentences).loss)
        model.train()
        return found


def gpt(vocabulary=40):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, **dropout))


def tokenizer(number=40):
    """Of whole words: w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [f"w{index}" for index in range(number)] + ["<pad>", "<eos>", "<unk>"]
    of_words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=of_words, **special)


def text(words):
    return " ".join(f"w{word}" for word in words)


def tell(model, before, after, data=None, **more):
    """before, after: the loss of all data."""
    state = [value.detach().cpu().double() for value in model.state_dict().values()]
    digest = hashlib.blake2b(b"".join(value.numpy().tobytes() for value in state)).hexdigest()
    sums = [float(value.sum()) for value in state]
    read = sorted(data.read) if data is not None else []
    print(
        json.dumps({"weights": digest, "sums": sums, "before": before, "after": after, "read": read, **more}),
        flush=True,
    )
