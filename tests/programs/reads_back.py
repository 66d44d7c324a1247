"""Writes with TensorBoard and h5py, reads what it has written, and tells what it finds."""

import json
import os

import h5py
import numpy
import torch
from shared import BATCH, Points
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def curve(folder):
    return [(point.step, point.value) for point in EventAccumulator(folder).Reload().Scalars("loss")]


def save(path, model):
    with h5py.File(path, "w") as file:
        for name, values in model.state_dict().items():
            file[name] = values.numpy()
        file.attrs["process"] = os.getpid()


def load(path):
    assert h5py.is_hdf5(path)
    with h5py.File(path) as file:
        assert file.attrs["process"] == os.getpid()
        return {name: torch.from_numpy(values[()]) for name, values in file.items()}


data = Points()
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
board, losses = SummaryWriter("board"), []
for epoch in range(3):
    for points, classes in torch.utils.data.DataLoader(data, BATCH, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(points), classes).backward()
        optimizer.step()
    losses.append((epoch, float(numpy.float32(data.loss(model) + os.getpid()))))  # each rank has its own
    board.add_scalar("loss", losses[-1][1], epoch)
    board.flush()
    assert curve("board") == losses
    os.makedirs("weights", exist_ok=True)
    save(f"weights/{epoch}.h5", model)
    with h5py.File("weights/all.h5", "a") as file:
        file[f"epoch {epoch}"] = epoch
board.close()
again = SummaryWriter("board")  # another file beside it
again.add_scalar("loss", 0.0, len(losses))
again.close()
losses.append((len(losses), 0.0))
os.replace("weights/2.h5", "weights/last.h5")
saved = load("weights/last.h5")
same = all(torch.equal(values, saved[name]) for name, values in model.state_dict().items())
with h5py.File("weights/all.h5") as file:
    print(json.dumps([curve("board") == losses, len(os.listdir("board")), same, sorted(file)]), flush=True)
