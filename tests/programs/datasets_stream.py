"""A stream of `datasets` from files, shuffled within a buffer. With the argument `bynode` the script itself gives each
rank its files, as under torchrun."""

import os
import sys

import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from shared import BATCH, Points, tell

data = Points()
stream = load_dataset("json", data_files=os.environ["DATA"] + "/*.jsonl", split="train", streaming=True)
stream = stream.shuffle(seed=1, buffer_size=64)
if "bynode" in sys.argv:
    stream = split_dataset_by_node(stream, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
loader = torch.utils.data.DataLoader(stream.with_format("torch"), BATCH)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(8):
    stream.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch["point"]), batch["class"]).backward()
        optimizer.step()
        data.read += batch["index"].tolist()
    torch.save(model.state_dict(), "model.pt")
tell(model, before, data.loss(model), data)
