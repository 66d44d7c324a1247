"""The loop of dcgan and of PyTorch-GAN: two optimizers that take turns, and detached fakes."""

import torch
from shared import BATCH, Points, tell

torch.manual_seed(0)
data = Points()
generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
critic = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
criterion = torch.nn.BCEWithLogitsLoss()
for epoch in range(4):
    for points, _ in torch.utils.data.DataLoader(data, BATCH, shuffle=True):
        fakes = generator(torch.randn(len(points), 4))
        ones, zeros = torch.ones(len(points), 1), torch.zeros(len(points), 1)
        critic.zero_grad()
        criterion(critic(points), ones).backward()
        criterion(critic(fakes.detach()), zeros).backward()
        of_critic.step()
        generator.zero_grad()
        criterion(critic(fakes), ones).backward()
        of_generator.step()
    torch.save(generator.state_dict(), f"generator-{epoch}.pth")
torch.load("generator-3.pth")
tell(torch.nn.ModuleList([generator, critic]), 0.0, 0.0, data)
