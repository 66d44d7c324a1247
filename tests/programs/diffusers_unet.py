import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from shared import tell

accelerator = Accelerator(gradient_accumulation_steps=1)
torch.manual_seed(0)
images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1)).sign()
sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "block_out_channels": (8, 8), "norm_num_groups": 4}
blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "layers_per_block": 1}
model, noise_schedule = UNet2DModel(**sizes, **blocks), DDPMScheduler(num_train_timesteps=20)


def loss(batch, generator=None):
    noise = torch.randn(batch.shape, generator=generator)
    times = torch.randint(0, 20, (len(batch),), generator=generator)
    return torch.nn.functional.mse_loss(model(noise_schedule.add_noise(batch, noise, times), times).sample, noise)


def whole():
    with torch.no_grad():
        return float(loss(images, torch.Generator().manual_seed(2)))


before = whole()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), 4, shuffle=True)
schedule = get_cosine_schedule_with_warmup(optimizer, 4, 16 * len(loader))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(16):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("out")
UNet2DModel.from_pretrained("out")
tell(accelerator.unwrap_model(model), before, whole())
