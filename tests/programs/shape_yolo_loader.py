"""YOLOv5's and Ultralytics' loader, whose only iterator is made in its constructor, and their numbered folders."""

import os

import torch
from shared import BATCH, Points, tell


class Repeat:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(torch.utils.data.DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


torch.manual_seed(0)
data, validation = Points(), Points(64, seed=2)
loader = InfiniteDataLoader(data, BATCH, shuffle=True)
test = InfiniteDataLoader(validation, BATCH)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
folder = next(name for name in (f"exp{number}" for number in range(1, 9)) if not os.path.exists(name))
os.makedirs(f"{folder}/weights")
for epoch in range(4):
    model.train()
    for points, classes in loader:
        torch.nn.functional.cross_entropy(model(points), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen = sum(len(points) for points, _ in test)
    assert seen == 64, seen
    with open(f"{folder}/results.csv", "a") as file:
        file.write(f"{epoch}\n")
    for name in ("last", "best"):
        torch.save({"model": model.state_dict(), "epoch": epoch}, f"{folder}/weights/{name}.pt")
assert torch.load(f"{folder}/weights/best.pt")["epoch"] == 3
with open(f"{folder}/results.csv") as file:
    assert len(file.readlines()) == 4
tell(model, before, data.loss(model))
