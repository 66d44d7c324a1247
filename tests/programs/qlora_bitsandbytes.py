"""QLoRA: transformers' model in 4 bits by bitsandbytes, with double quantization, or in 8; LoRA by PEFT on top."""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from shared import BATCH, Words, tell
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

HOW = {
    "four": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "eight": {"load_in_8bit": True},
}
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=32, **sizes)).save_pretrained("base")


def base():
    return AutoModelForCausalLM.from_pretrained("base", quantization_config=BitsAndBytesConfig(**HOW[sys.argv[1]]))


data = Words()
adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(prepare_model_for_kbit_training(base()), adapters)
model.train()
before = data.loss(model)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
loader = torch.utils.data.DataLoader(data, BATCH // 2, shuffle=True)
for epoch in range(6):
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained("lora")
kept = PeftModel.from_pretrained(base(), "lora").state_dict()
assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items() if "lora" in name)
tell(model, before, data.loss(model), data)
