"""Digits with plain DistributedDataParallel and nothing of paceline: equal shares, or shares tuned by hand.

torchrun --nproc-per-node 4 digits_ddp.py [--shares 1,2,3,4]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from paceline.lab.scripts.digits import Marks, data, net


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--shares", default="")
    parser.add_argument("--test-every", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shares = [float(part) for part in options.shares.split(",")] if options.shares else [1.0] * size
    ends = [round(options.batch_size * sum(shares[: i + 1]) / sum(shares)) for i in range(size)]
    begin, end = (ends[rank - 1] if rank else 0), ends[rank]
    train, test = data()
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = train.tensors
    marks, step, epoch = Marks(), 0, 0
    while step < options.steps:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        epoch += 1
        for start in range(0, len(train) - options.batch_size + 1, options.batch_size):
            mine = order[start + begin : start + end]
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            # DDP takes the plain mean over workers; this makes it the mean over samples.
            (loss * (len(mine) * size / options.batch_size)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            marks.step()
            if step % options.test_every == 0:
                marks.tested(accuracy(model.module, test, rank, size))
            if step == options.steps:
                break
    if rank == 0:
        print(f"accuracy {accuracy(model.module, test, 0, 1):.4f}")
    dist.barrier()
    del model
    dist.destroy_process_group()


def accuracy(module: torch.nn.Module, test: TensorDataset, rank: int, size: int) -> float:
    """Share of test images classified right; every worker takes a part."""
    x, y = (tensor[rank::size] for tensor in test.tensors)
    with torch.no_grad():
        correct = (module(x).argmax(1) == y).sum()
    if size > 1:
        dist.all_reduce(correct)
    return float(correct) / len(test)


main()
