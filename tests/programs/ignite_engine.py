import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy, Loss
from shared import BATCH, Points, tell

torch.manual_seed(0)
data = Points()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
before = data.loss(model)
objective = torch.nn.CrossEntropyLoss()
trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), objective)
evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(objective)})
loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
validation = torch.utils.data.DataLoader(Points(64, seed=2), 8)
found = []


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(validation)
    found.append(evaluator.state.metrics["loss"])


checkpoints = ModelCheckpoint("checkpoints", n_saved=2, score_function=lambda engine: -engine.state.metrics["loss"])
evaluator.add_event_handler(Events.COMPLETED, checkpoints, {"model": model})
trainer.run(loader, max_epochs=8)
torch.load(checkpoints.last_checkpoint)
tell(model, before, data.loss(model), data, validation=found)
