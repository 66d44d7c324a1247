import torch
from peft import LoraConfig, PeftModel, get_peft_model
from shared import BATCH, Words, gpt, tell

data = Words()
model = get_peft_model(gpt(), LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
before = data.loss(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
loader = torch.utils.data.DataLoader(data, BATCH // 2, shuffle=True)
for epoch in range(10):
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained("lora")
kept = PeftModel.from_pretrained(gpt(), "lora").state_dict()
assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
tell(model, before, data.loss(model), data)
