"""No contender but the limit: every worker alone with its share, one after the other; then all at once, exchanging nothing."""

from __future__ import annotations

import itertools
import json
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.task import Task


def train(task: Task) -> None:
    """Measure; writes `alone_s` and `together_s`, the median step of this worker, beside the marks."""
    dist.init_process_group("gloo")
    share = task.options["split"][task.rank]
    groups = [dist.new_group([rank]) for rank in range(task.size)]
    model = DistributedDataParallel(task.model(), process_group=groups[task.rank])
    optimizer = task.optimizer(model.parameters())
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(task.seed)).tolist()
    batches = itertools.cycle([order[at : at + share] for at in range(0, len(order) - share + 1, share)])

    def measure() -> list[float]:
        times = []
        for step in range(task.steps + 3):
            begun = time.perf_counter()
            task.loss(model, task.train.__getitems__(next(batches))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if task.device.type == "cuda":
                torch.cuda.synchronize()
            if step >= 3:
                times.append(time.perf_counter() - begun)
        return times

    alone: list[float] = []
    for turn in range(task.size):
        dist.barrier()
        if turn == task.rank:
            alone = measure()
    dist.barrier()
    together = measure()
    dist.barrier()
    assert task.marks is not None
    path = task.marks.parent / f"solo-{task.rank}.json"
    path.write_text(json.dumps({"samples": share, "alone_s": alone, "together_s": together}))
    dist.barrier()
    dist.destroy_process_group()
