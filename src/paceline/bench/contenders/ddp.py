"""Plain DistributedDataParallel: equal shares, or shares tuned by hand with the loss scaled to match.

`task.options["hook"]` is one of torch's own compressing hooks: "bf16" (which torch refuses over gloo), "fp16", or "powersgd"
(Vogels et al. 2019) of rank 2.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.task import Task


def train(task: Task) -> None:
    """Train; `task.options["split"]` is each worker's batch, equal if left out."""
    dist.init_process_group("gloo")
    split = task.options.get("split") or [task.batch_size // task.size] * task.size
    total = sum(split)
    begin = sum(split[: task.rank])
    end = begin + split[task.rank]
    # DDP takes the plain mean over workers; this makes it the mean over samples.
    scale = split[task.rank] * task.size / total
    model = DistributedDataParallel(task.model())
    if task.options.get("hook") == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif task.options.get("hook") == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif task.options.get("hook") == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = task.optimizer(model.parameters())
    for epoch in itertools.count():
        order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(task.seed + epoch)).tolist()
        for start in range(0, len(order) - total + 1, total):
            batch = task.train.__getitems__(order[start + begin : start + end])
            (task.loss(model, batch) * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            if task.stepped(model.module):
                dist.barrier()
                del model
                dist.destroy_process_group()
                return
