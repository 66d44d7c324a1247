import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from shared import BATCH, Points, tell
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def configure_model(self):
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("validation", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if sys.argv[1:2] == ["load"]:  # in one process: of what the training has left
    dcp_to_torch_save(sys.argv[2], "whole.ckpt")
    model = Classifier()
    model.load_state_dict(torch.load("whole.ckpt")["state_dict"])
    tell(model.net, 0.0, Points().loss(model.net))
else:
    lightning.seed_everything(1)
    model, data = Classifier(), Points()
    before = data.loss(model.net)
    checkpoints = ModelCheckpoint("checkpoints", monitor="validation", save_top_k=2, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=8,
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints],
    )
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    trainer.fit(model, loader, torch.utils.data.DataLoader(Points(64, seed=2), 8))
    assert type(model.net[0].weight).__name__ == "DTensor" and trainer.world_size == 2
    trained = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    for mine, parameter in zip(trained.parameters(), model.parameters(), strict=True):
        mine.data.copy_(parameter.full_tensor())
    tell(trained, before, data.loss(trained), data, validation=float(trainer.callback_metrics["validation"]))
