"""Makes what the script of docs/lora.md reads, small: a Llama with a tokenizer that knows how to chat, and
conversations."""

import json
import sys
from pathlib import Path

import torch
from shared import text, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

base, data = (Path(each) for each in sys.argv[1:])
words = tokenizer()
words.chat_template = "{% for m in messages %}{{ m['content'] }} {{ eos_token }} {% endfor %}"
sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=64, **sizes))
model.to(torch.bfloat16).save_pretrained(base)
words.save_pretrained(base)
data.mkdir(parents=True)
with (data / "train.jsonl").open("w") as lines:
    for start in range(256):
        said = [text([(start + 3 * word) % 40 for word in part]) for part in (range(5), range(5, 14))]
        roles = ("user", "assistant")
        chat = [{"role": role, "content": words} for role, words in zip(roles, said, strict=True)]
        print(json.dumps({"messages": chat}), file=lines)
