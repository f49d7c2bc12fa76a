"""Image classification: a small convolutional net on scikit-learn's digits.

    paceline run --nproc 4 examples/images.py
    paceline lab run --cluster four-unlike examples/images.py      # on four emulated, unlike workers

Goes on from its checkpoint if there is one.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", type=Path, default=None)
options = parser.parse_args()

pace = paceline.init()

digits = load_digits()
images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16 - 0.5
labels = torch.from_numpy(digits.target).long()
train, test = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(512, 10),
).to(pace.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
model = pace.wrap(model, optimizer)
loader = pace.loader(train, batch_size=128)


def count(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, y = batch
    logits = model(x)
    return {"correct": (logits.argmax(1) == y).sum(), "loss": F.cross_entropy(logits, y, reduction="sum")}


if options.checkpoint and options.checkpoint.exists():
    pace.load(options.checkpoint, scheduler=scheduler)

for epoch in range(loader.epoch, options.epochs):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    result = pace.evaluate(count, test)
    if options.checkpoint:
        pace.save(options.checkpoint, scheduler=scheduler)
    if pace.is_main:
        accuracy, loss = result["correct"] / result["count"], result["loss"] / result["count"]
        print(f"epoch {epoch}: test accuracy {accuracy:.3f}, loss {loss:.3f}, split {loader.split}")
