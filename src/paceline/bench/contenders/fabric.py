"""Lightning Fabric 2.6: `Fabric.setup` and `setup_dataloaders` with its DDP strategy; equal shares.

`setup_dataloaders` puts torch's DistributedSampler into a plain loader and moves it on from epoch to epoch. `setup` wraps the
model in torch's DistributedDataParallel, inside a module of its own.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

from paceline.bench.task import Task, as_it_is


def train(task: Task) -> None:
    """Train until the task is over."""
    # To Fabric every worker is a machine with one device: it allows one process per device, but our workers may share one.
    os.environ["LOCAL_RANK"] = "0"
    fabric = Fabric(
        accelerator=task.device.type,
        devices=1 if task.device.type == "cpu" else [task.device.index or 0],
        num_nodes=task.size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    fabric.seed_everything(task.seed, verbose=False)  # of its sampler
    plain = task.model()
    model, optimizer = fabric.setup(plain, task.optimizer(plain.parameters()))
    loader = fabric.setup_dataloaders(
        DataLoader(task.train, task.batch_size // task.size, shuffle=True, drop_last=True, collate_fn=as_it_is)
    )
    over = False
    while not over:
        for batch in loader:
            fabric.backward(task.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            over = task.stepped(plain)
            if over:
                break
    fabric.barrier()
    del model
    dist.destroy_process_group()
