"""Digits with paceline.

paceline run --nproc 4 digits_paceline.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import paceline
from paceline.lab.scripts.digits import Marks, data, net


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--test-every", type=int, default=10)
    options = parser.parse_args()
    pace = paceline.init()
    train, test = data()
    model = net().to(pace.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(train, options.batch_size, drop_last=True)

    def correct(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"correct": (model(x).argmax(1) == y).sum()}

    marks, step = Marks(), 0
    while step < options.steps:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            marks.step()
            if step % options.test_every == 0:
                marks.tested(pace.evaluate(correct, test)["correct"] / len(test))
            if step == options.steps:
                break
    result = pace.evaluate(correct, test)
    if pace.is_main:
        print(f"accuracy {result['correct'] / result['count']:.4f}")


main()
