"""Samples in tar files, by webdataset. With the argument `bynode` the script asks for files to be divided among ranks,
with `loader` it takes webdataset's own loader, which batches within the data set and has worker processes."""

import os
import sys

import torch
import webdataset
from shared import BATCH, Points, tell

data = Points()
files = sorted(
    os.path.join(os.environ["DATA"], name) for name in os.listdir(os.environ["DATA"]) if name.endswith("tar")
)
options = {"nodesplitter": webdataset.split_by_node} if "bynode" in sys.argv else {}
samples = webdataset.WebDataset(files, shardshuffle=False, **options).decode().to_tuple("__key__", "json")
samples = samples.map(lambda pair: (int(pair[0]), torch.tensor(pair[1]["point"]), pair[1]["class"]))
if "loader" in sys.argv:
    loader = webdataset.WebLoader(samples.batched(BATCH), batch_size=None, num_workers=2)
else:
    loader = torch.utils.data.DataLoader(samples, BATCH)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(8):
    for indices, points, classes in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(points), torch.as_tensor(classes)).backward()
        optimizer.step()
        data.read += torch.as_tensor(indices).tolist()
    torch.save(model.state_dict(), "model.pt")
tell(model, before, data.loss(model), data)
