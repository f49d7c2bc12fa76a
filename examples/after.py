"""`before.py` with paceline: runs on any number of unlike workers, and gives the same result."""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import paceline

pace = paceline.init()
torch.manual_seed(0)
x = torch.randn(2048, 20)
dataset = TensorDataset(x, (x @ torch.randn(20, 4)).argmax(1))

model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(pace.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model = pace.wrap(model, optimizer)
loader = pace.loader(dataset, batch_size=256)

for epoch in range(5):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if pace.is_main:
    torch.save(model.module.state_dict(), "model.pt")
