"""Hugging Face accelerate 1.15: `Accelerator.prepare` around model, optimizer and loader; equal shares.

Batches are dealt out by its own sharding of a plain loader, in an order seeded by its seedable sampler. `prepare` wraps the
model in torch's DistributedDataParallel. With `task.options["local_sgd"]` its `LocalSGD` averages parameters every so many steps.
"""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs
from torch.utils.data import DataLoader

from paceline.bench.task import Task, as_it_is


def train(task: Task) -> None:
    """Train until the task is over."""
    # It takes the GPU of its local rank, but our workers may share one.
    os.environ["LOCAL_RANK"] = str(task.device.index or 0)
    accelerator = Accelerator(
        cpu=task.device.type == "cpu",
        mixed_precision="no",  # the task's own autocast is the same for every contender
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=task.seed),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    plain = task.model()
    loader = DataLoader(task.train, task.batch_size // task.size, shuffle=True, drop_last=True, collate_fn=as_it_is)
    model, optimizer, loader = accelerator.prepare(plain, task.optimizer(plain.parameters()), loader)
    every = task.options.get("local_sgd", 1)
    task.apart, over = every > 1, False
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=every, enabled=every > 1) as local_sgd:
        while not over:
            for batch in loader:
                accelerator.backward(task.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
                over = task.stepped(plain)
                if over:
                    break
    accelerator.wait_for_everyone()
    del model
    accelerator.free_memory()
    accelerator.end_training()
