import torch
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner
from shared import BATCH, Points, tell

torch.manual_seed(0)
data = Points()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
learner = Learner(
    DataLoaders.from_dsets(data, Points(64, seed=2), bs=BATCH, device="cpu", num_workers=0),
    model,
    loss_func=CrossEntropyLossFlat(),
)
learner.fit(8, lr=1e-2)
learner.save("model")
learner.load("model")
tell(model, before, data.loss(model), data)
