import torch
from lightning.fabric import Fabric
from shared import BATCH, Points, tell

fabric = Fabric(accelerator="cpu")
fabric.launch()
torch.manual_seed(0)
data = Points()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, BATCH, shuffle=True))
for epoch in range(8):
    for points, classes in loader:
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.cross_entropy(model(points), classes))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    fabric.save(f"epoch-{epoch}.ckpt", {"model": model, "optimizer": optimizer})
fabric.load("epoch-7.ckpt", {"model": model, "optimizer": optimizer})
tell(model.module, before, data.loss(model), data)
