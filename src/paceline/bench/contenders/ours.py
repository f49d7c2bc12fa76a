"""paceline with the policies of `task.options`: `balance`, `sync`, `batch`, and `lr_rule`; what is under `wrap` goes to `pace.wrap`.

With `shards` every worker trains on a shard of its own, made by that method from at most 64 principal components of the inputs,
before the clock starts; by `split` if there is one, else equal.
A batch of its own (`batch_size`) gets the learning rate by the same rule, from the one the workload has for the suite's batch.
"""

from __future__ import annotations

import paceline
from paceline.bench.task import Task, as_it_is
from paceline.policies.batch.rates import factor


def train(task: Task) -> None:
    """Train."""
    pace = paceline.init(
        balance=task.options["balance"],
        sync=task.options.get("sync", "allreduce"),
        batch=task.options.get("batch", "constant"),
        lr_rule=task.options.get("lr_rule", "none"),
        device=str(task.device),
        backend="gloo",
        seed=task.seed,
    )
    task.apart = "sync" in task.options
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    if task.batch_size != task.usual_batch:
        for group in optimizer.param_groups:
            group["lr"] *= factor(task.options.get("lr_rule", "none"), task.usual_batch, task.batch_size, None)
    model = pace.wrap(model, optimizer, **task.options.get("wrap", {}))
    plan = None
    if "shards" in task.options:
        x, y = task.train.tensors[0], task.train.tensors[-1]
        matrix, labels = x.flatten(1).float().cpu().numpy(), y.cpu().numpy() if y.dim() == 1 else None
        speeds = task.options["split"] or [1] * task.size
        plan = pace.partition(matrix, labels, speeds=speeds, method=task.options["shards"], columns=64)
    loader = pace.loader(task.train, task.batch_size, drop_last=True, collate_fn=as_it_is, partition=plan)
    while True:
        for batch in loader:
            loss = task.loss(model, batch)
            loss.backward()
            pace.report(loss)
            optimizer.step()
            optimizer.zero_grad()
            if task.stepped(model.module, loader.samples):
                return
