"""paceline with one of its balance policies, `task.options["balance"]`, and of its sync policies, `task.options["sync"]`; what is
under `wrap` goes to `pace.wrap`.
"""

from __future__ import annotations

import paceline
from paceline.bench.task import Task, as_it_is


def train(task: Task) -> None:
    """Train."""
    pace = paceline.init(
        balance=task.options["balance"],
        sync=task.options.get("sync", "allreduce"),
        device=str(task.device),
        backend="gloo",
        seed=task.seed,
    )
    task.apart = "sync" in task.options
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    model = pace.wrap(model, optimizer, **task.options.get("wrap", {}))
    loader = pace.loader(task.train, task.batch_size, drop_last=True, collate_fn=as_it_is)
    while True:
        for batch in loader:
            loss = task.loss(model, batch)
            loss.backward()
            pace.report(loss)
            optimizer.step()
            optimizer.zero_grad()
            if task.stepped(model.module):
                return
