import torch
from shared import BATCH, Points, tell
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, EarlyStopping

data = Points()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, points):
        return self.layers(points)


torch.manual_seed(0)
how = {"max_epochs": 8, "lr": 0.1, "batch_size": BATCH, "iterator_train__shuffle": True, "verbose": 0}
callbacks = [EarlyStopping(patience=3), Checkpoint(dirname="checkpoints")]
net = NeuralNetClassifier(Net, criterion=torch.nn.CrossEntropyLoss, callbacks=callbacks, **how)
net.initialize()
before = data.loss(net.module_)
net.fit(data.points.numpy(), data.classes.numpy())
net.load_params(checkpoint=callbacks[1])
tell(net.module_, before, data.loss(net.module_), validation=[row["valid_loss"] for row in net.history][1:])
