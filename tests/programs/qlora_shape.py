"""QLoRA's shape by hand: each linear layer's weight is kept in 4 bits (`four`) or 8 (`eight`), packed into a buffer
with a scale for each row, and dequantized in each forward; LoRA by PEFT is trained on top."""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from shared import BATCH, Points, tell

BITS = {"four": 4, "eight": 8}[sys.argv[1]]


class Quantized(torch.nn.Linear):
    """Of a linear layer that nothing trains."""

    def __init__(self, of):
        super().__init__(of.in_features, of.out_features)
        most = 2 ** (BITS - 1) - 1
        scale = of.weight.detach().abs().amax(1, keepdim=True) / most
        levels = (of.weight.detach() / scale).round().to(torch.int16).add(most).to(torch.uint8)
        packed = levels[:, 0::2] | levels[:, 1::2] << 4 if BITS == 4 else levels
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.most = most
        self.bias = of.bias.requires_grad_(False)
        del self._parameters["weight"]

    @property
    def weight(self):
        levels = self.packed
        if BITS == 4:
            levels = torch.stack([levels & 15, levels >> 4], -1).flatten(1)
        return (levels.float() - self.most) * self.scale

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


def base():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)]
    return torch.nn.Sequential(*(Quantized(each) if isinstance(each, torch.nn.Linear) else each for each in layers))


data = Points()
adapters = LoraConfig(r=4, target_modules=["0", "2", "4"])
model = get_peft_model(base(), adapters)
before = data.loss(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
for epoch in range(8):
    for points, classes in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(points), classes).backward()
        optimizer.step()
    model.save_pretrained("lora")
kept = PeftModel.from_pretrained(base(), "lora").state_dict()
assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
tell(model, before, data.loss(model), data)
