"""Adapters by PEFT on a model that stays as it is: LoRA, or with an argument `ia3` or `prompt`."""

import sys

import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from shared import BATCH, Words, gpt, tell

ADAPTERS = {
    "lora": LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    "ia3": IA3Config(target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
how = sys.argv[1] if len(sys.argv) > 1 else "lora"
data = Words()
model = get_peft_model(gpt(), ADAPTERS[how])
before = data.loss(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
loader = torch.utils.data.DataLoader(data, BATCH // 2, shuffle=True)
for epoch in range(10):
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained("adapters")
kept = PeftModel.from_pretrained(gpt(), "adapters").state_dict()
assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
tell(model, before, data.loss(model), data)
