import torch
from shared import BATCH, tell
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

generator = torch.Generator().manual_seed(1)


def graph(kind):
    edges = torch.randint(0, 6, (2, 12), generator=generator)
    return Data(x=torch.randn(6, 4, generator=generator) + kind, edge_index=edges, y=torch.tensor([kind]))


graphs = [graph(number % 2) for number in range(96)]
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(4, 16), torch.nn.Linear(16, 2)

    def forward(self, batch):
        return self.head(global_mean_pool(self.conv(batch.x, batch.edge_index).relu(), batch.batch))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
training, test = DataLoader(graphs[:64], BATCH, shuffle=True), DataLoader(graphs[64:], BATCH)


@torch.no_grad()
def accuracy(loader):
    model.eval()
    return sum(int((model(batch).argmax(1) == batch.y).sum()) for batch in loader) / len(loader.dataset)


@torch.no_grad()
def loss():
    batch = next(iter(DataLoader(graphs, 96)))
    return float(torch.nn.functional.cross_entropy(model(batch), batch.y))


before = loss()
for epoch in range(20):
    model.train()
    for batch in training:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), batch.y).backward()
        optimizer.step()
    found = [accuracy(training), accuracy(test)]
assert all(0.5 < each <= 1.0 for each in found), found
tell(model, before, loss(), validation=found)
