"""torch's own local methods: post-local SGD, and hierarchical averaging of models; equal shares.

`task.options`: `kind` ("post-local" or "hierarchical"), `every` (steps between averages over everybody), `warm_up` (steps with
gradients summed over everybody first).
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.task import Task


def train(task: Task) -> None:
    """Train; workers of a node sum their gradients in every step."""
    # Imported here: torch.distributed.optim compiles something, and says that this is deprecated.
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    task.apart = True
    dist.init_process_group("gloo")
    on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    node, _ = dist.new_subgroups(group_size=on_node)
    every, warm_up = task.options["every"], task.options["warm_up"]
    model = DistributedDataParallel(task.model())
    model.register_comm_hook(PostLocalSGDState(None, node, warm_up), post_localSGD_hook)
    if task.options["kind"] == "hierarchical":
        # Within nodes gradients agree already; its second level is everybody.
        averager = HierarchicalModelAverager(OrderedDict([(every // 2, on_node), (every, task.size)]), warm_up)
    else:
        averager = PeriodicModelAverager(every, warm_up)
    optimizer = PostLocalSGDOptimizer(task.optimizer(model.parameters()), averager)
    share = task.batch_size // task.size
    for epoch in itertools.count():
        order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(task.seed + epoch)).tolist()
        for start in range(0, len(order) - task.batch_size + 1, task.batch_size):
            begin = start + task.rank * share
            task.loss(model, task.train.__getitems__(order[begin : begin + share])).backward()
            optimizer.step()
            optimizer.zero_grad()
            if task.stepped(model.module):
                dist.barrier()
                del model, optimizer
                dist.destroy_process_group()
                return
