"""Ways to train the digits net, each as an object that makes one step at a time.

All live in the same four processes, so that blocks of their steps can alternate and share whatever else the machine does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.task import Rows, as_it_is
from paceline.bench.workloads import workload
from paceline.comm import TorchComm
from paceline.config import Settings
from paceline.lab.paced import Pacer
from paceline.runtime.pace import Pace

TASK = workload("cnn-digits")


def rows(repeat: int) -> Rows:
    """The digits, several times over."""
    return Rows(*(tensor.repeat(repeat, *[1] * (tensor.dim() - 1)) for tensor in TASK.data()[0].tensors))


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return TASK.model()


class Ddp:
    """Plain DistributedDataParallel: equal shares, or shares set by hand with the loss scaled to match."""

    def __init__(self, pacer: Pacer, total: int, repeat: int, split: tuple[int, ...] | None) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        split = split or tuple(total // size for _ in range(size))
        self._begin, self._end = sum(split[:rank]), sum(split[: rank + 1])
        self._scale = split[rank] * size / total
        self._total = total
        self.model = DistributedDataParallel(net())
        pacer.attach(self.model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._rows = rows(repeat)
        self._batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        epoch = 0
        while True:
            order = torch.randperm(len(self._rows), generator=torch.Generator().manual_seed(epoch)).tolist()
            epoch += 1
            for start in range(0, len(order) - self._total + 1, self._total):
                yield self._rows.__getitems__(order[start + self._begin : start + self._end])

    def step(self) -> None:
        x, y = next(self._batches)
        (F.cross_entropy(self.model(x), y) * self._scale).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def split(self) -> tuple[int, ...]:
        return ()


class Paceline:
    """The same with paceline, a balance policy, and a batch policy that measures but is bound to the batch there is."""

    def __init__(self, pacer: Pacer, total: int, repeat: int, balance: str, batch: str) -> None:
        device = torch.device("cpu")
        self.pace = Pace(TorchComm(device, None, 60.0), Settings(balance=balance, batch=batch), device)
        model = net()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model = self.pace.wrap(model, self._optimizer)
        pacer.attach(self.model)
        self._loader = self.pace.loader(rows(repeat), total, drop_last=True, collate_fn=as_it_is)
        self._batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def step(self) -> None:
        x, y = next(self._batches)
        F.cross_entropy(self.model(x), y).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def split(self) -> tuple[int, ...]:
        return self._loader.split


def make(name: str, pacer: Pacer, total: int, repeat: int, by_hand: tuple[int, ...]) -> Any:
    """A contender by name."""
    if name == "plain DDP":
        return Ddp(pacer, total, repeat, None)
    if name == "hand-tuned DDP":
        return Ddp(pacer, total, repeat, by_hand)
    balance, _, measured = name.removeprefix("paceline ").partition(", ")
    chosen = {"": "constant", "norms": "noise-scale", "inner products": "augmented"}[measured]
    bound = f":least={total},most={total}" if measured else ""
    return Paceline(pacer, total, repeat, balance, chosen + bound)
