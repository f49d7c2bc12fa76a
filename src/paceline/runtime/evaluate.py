"""Evaluation over all workers, each sample once: sums over disjoint shards, then one sum of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data

from paceline.comm import Comm
from paceline.errors import ConfigError
from paceline.runtime.batches import to_device
from paceline.runtime.handshake import agree
from paceline.runtime.model import PacedModel


def evaluate(
    fn: Callable[[Any], Mapping[str, Any]],
    dataset: Any,
    *,
    comm: Comm,
    model: PacedModel | None,
    device: torch.device,
    split: tuple[int, ...],
    batch_size: int,
    **dataloader: Any,
) -> dict[str, float]:
    """Sum what `fn` returns over the whole dataset.

    Worker i takes a contiguous block whose length is its part of `split`. Blocks may need different numbers of batches:
    nothing is communicated until the end, so buffers are taken from worker 0 first and not broadcast in forward.

    Args:
        fn: batch -> sums over its samples, by name, e.g. {"correct": 31, "loss": 12.5}.
        dataset: map-style.
        comm: the door to the other workers.
        model: put into eval mode and back.
        device: where batches are moved.
        split: a division of len(dataset) over the workers.
        batch_size: samples per call of `fn` on one worker.
        dataloader: further arguments of DataLoader.

    Returns:
        The sums over all workers, and `count`, which equals len(dataset).
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(f"pace.evaluate needs a map-style dataset, got {type(dataset).__name__}")
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    agree(comm, "dataset to evaluate on", {"length": len(dataset)})
    begin = sum(split[: comm.rank])
    mine = torch.utils.data.Subset(dataset, range(begin, begin + split[comm.rank]))
    sums: dict[str, float] = {}
    count = 0
    with evaluating(model, comm):
        if len(mine):
            loader = torch.utils.data.DataLoader(mine, batch_size=batch_size, generator=torch.Generator(), **dataloader)
            for number, batch in enumerate(loader):
                for name, value in fn(to_device(batch, device)).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                count += min(batch_size, len(mine) - number * batch_size)
    return _joined(comm, sums, count, len(dataset))


@contextmanager
def evaluating(model: PacedModel | None, comm: Comm) -> Iterator[None]:
    """Inside, gradients are off and the model is in eval mode with worker 0's buffers; its forward communicates nothing."""
    modes = [(part, part.training) for part in model.modules()] if model is not None else []
    if model is not None:
        if model.broadcast_buffers:
            comm.broadcast_(list(model.module.buffers()))
        model.require_forward_param_sync = False
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if model is not None:
            for part, training in modes:  # one by one: a frozen part may be in eval mode all along
                part.training = training
            model.require_forward_param_sync = True


def _joined(comm: Comm, sums: dict[str, float], count: int, length: int) -> dict[str, float]:
    if "count" in sums:
        raise ConfigError("pace.evaluate counts the samples itself: fn must not return 'count'")
    named = agree(comm, "names of sums in evaluate", {"_names": sorted(sums), "_sums": sums, "_count": count})
    names = {name for one in named for name in one["_names"]}
    for rank, one in enumerate(named):
        if one["_count"] and set(one["_names"]) != names:
            raise ConfigError(
                f"fn must return the same names for every batch: worker {rank} has {one['_names']}, all have {sorted(names)}"
            )
    totals = {name: math.fsum(one["_sums"].get(name, 0.0) for one in named) for name in sorted(names)}
    totals["count"] = float(sum(one["_count"] for one in named))
    assert totals["count"] == length, (totals["count"], length)
    return totals
