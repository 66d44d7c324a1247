import datetime
import os
import time

import torch
import watched
from torch import nn
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def load_state_dict(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def state_dict():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


replica, seconds = int(os.environ["REPLICA_GROUP_ID"]), datetime.timedelta(seconds=6)
manager = Manager(
    pg=ProcessGroupGloo(timeout=seconds),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"replica_{replica}",
    timeout=seconds,
    quorum_timeout=2 * seconds,
    connect_timeout=seconds,
)
if os.path.exists("model.pt"):
    checkpoint = torch.load("model.pt", weights_only=True)
    load_state_dict(checkpoint)
    manager.load_state_dict(checkpoint["manager"])
ddp = DistributedDataParallel(manager, model)
wrapped = Optimizer(manager, optimizer)
data = torch.utils.data.TensorDataset(torch.randn(6400, 64), torch.randint(10, (6400,)))
sampler = DistributedSampler(data, replica_rank=replica, num_replica_groups=4, group_rank=0, num_replicas=1)
loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)
while manager.current_step() < 600:
    sampler.set_epoch(manager.current_step() // 100)
    for x, y in loader:
        wrapped.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        wrapped.step()
        time.sleep(0.02)
        watched.step(manager.current_step())
        if manager.current_step() % 25 == 0 and manager.participating_rank() == 0:
            torch.save({**state_dict(), "manager": manager.state_dict()}, "model.new")
            os.replace("model.new", "model.pt")
        if manager.current_step() >= 600:
            break
watched.end(manager.current_step(), model)
manager.shutdown()
