import sys

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from shared import BATCH, Points, tell

HOW = sys.argv[1]
MORE = {
    "accumulating": {"accumulate_grad_batches": 2},
    "unevenly": {"accumulate_grad_batches": 3, "max_epochs": 12},  # the last step of a pass has one batch
    "clipping": {"gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed"},
}


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        self.automatic_optimization = HOW not in ("manual", "several")

    def forward(self, points):
        return self.net(points)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizers = self.optimizers() if HOW == "several" else [self.optimizers()]
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
        return loss

    def validation_step(self, batch, index):
        self.log("validation", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        parts = [self.net[0], self.net[2]] if HOW == "several" else [self.net]
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]


torch.manual_seed(0)
model, data = Classifier(), Points()
before = data.loss(model)
checkpoints = ModelCheckpoint("checkpoints", monitor="validation", save_top_k=2)
trainer = lightning.Trainer(
    accelerator="cpu",
    logger=[CSVLogger("csv"), TensorBoardLogger("board")],
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[checkpoints, EarlyStopping("validation", patience=3)],
    **{"max_epochs": 8, **MORE.get(HOW, {})},
)
loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
trainer.fit(model, loader, torch.utils.data.DataLoader(Points(64, seed=2), 8))
Classifier.load_from_checkpoint(checkpoints.best_model_path)
assert trainer.world_size == 1
tell(model, before, data.loss(model), data, validation=float(trainer.callback_metrics["validation"]))
