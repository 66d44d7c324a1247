import datetime
import itertools
import os
import time

import torch
import torch.distributed as dist
import watched
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(6400, 64), torch.randint(10, (6400,)))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)
step = 0
if os.path.exists("model.pt"):
    checkpoint = torch.load("model.pt", weights_only=True)
    model.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    step = checkpoint["step"]
while step < 600:
    epoch, seen = divmod(step, 100)
    sampler.set_epoch(epoch)
    for x, y in itertools.islice(loader, seen, 100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        step += 1
        watched.step(step)
        if step % 25 == 0 and dist.get_rank() == 0:
            checkpoint = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(checkpoint, "model.new")
            os.replace("model.new", "model.pt")
watched.end(step, model)
dist.destroy_process_group()
