"""Features for shards, from the model itself: what its last layer sees, computed by all workers, each its part of the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from paceline.comm import Comm
from paceline.errors import ConfigError
from paceline.runtime.batches import to_device
from paceline.runtime.evaluate import evaluating
from paceline.runtime.model import PacedModel
from paceline.shards import ShardPlan, partition

SHARING = "sharing the plan of shards"


def collect(
    dataset: Any,
    fn: Callable[[Any], torch.Tensor] | None,
    *,
    comm: Comm,
    model: PacedModel | None,
    device: torch.device,
    split: tuple[int, ...],
    batch_size: int,
    **dataloader: Any,
) -> NDArray[np.float32] | None:
    """A matrix with a row per sample on worker 0, None elsewhere.

    Args:
        dataset: map-style.
        fn: batch -> a row per sample; by default what goes into the model's last linear layer.
        comm: the door to the other workers.
        model: the wrapped model.
        device: where batches are moved.
        split: a division of len(dataset) over the workers.
        batch_size: samples per call on one worker.
        dataloader: further arguments of DataLoader.
    """
    begin = sum(split[: comm.rank])
    mine = torch.utils.data.Subset(dataset, range(begin, begin + split[comm.rank]))
    own = fn or _penultimate(model)
    rows, problem = [], ""
    with evaluating(model, comm):
        if len(mine):
            loader = torch.utils.data.DataLoader(mine, batch_size, generator=torch.Generator(), **dataloader)
            for batch in loader:
                found = own(to_device(batch, device)).detach().float().cpu()
                rows.append(found.view(len(found), -1) if found.dim() else found.view(1, 1))
    joined = torch.cat(rows) if rows else torch.zeros(0, 1)
    if len(joined) != len(mine):
        problem = (
            f"features must have a row per sample: worker {comm.rank} got {len(joined)} rows for {len(mine)} samples"
        )
    problems = [text for text in comm.gather_text(problem, "collecting features") if text]
    if problems:
        raise ConfigError(problems[0])
    everybody = comm.collect(joined.contiguous().view(-1))
    if everybody is None:
        return None
    columns = joined.shape[1] if len(mine) else 1
    parts = [part.view(count, -1) for part, count in zip(everybody, split, strict=True) if count]
    if len({part.shape[1] for part in parts}) > 1:
        raise ConfigError(
            f"all workers must compute as many features: got {sorted({p.shape[1] for p in parts})}, here {columns}"
        )
    return torch.cat(parts).numpy()


def _penultimate(model: PacedModel | None) -> Callable[[Any], torch.Tensor]:
    if model is None:
        raise ConfigError("features come from the model: call pace.wrap first, or give fn=batch -> a row per sample")
    layers = [part for part in model.module.modules() if isinstance(part, torch.nn.Linear)]
    if not layers:
        raise ConfigError(
            f"{type(model.module).__name__} has no linear layer to look before: give fn=batch -> a row per sample"
        )

    def look(batch: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = layers[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            model.module(batch[0] if isinstance(batch, (list, tuple)) else batch)
        finally:
            hook.remove()
        if not seen:
            raise ConfigError(
                "the model's last linear layer was not used in forward: give fn=batch -> a row per sample"
            )
        return seen[-1]

    return look


def shared_partition(
    comm: Comm, features: Any, labels: Any, speeds: Sequence[float], settings: dict[str, Any]
) -> ShardPlan:
    """Worker 0 makes the plan, with these settings of `paceline.partition`; everybody gets it, or the same error."""
    plan, text = None, "{}"
    if comm.rank == 0:
        try:
            if features is None:
                raise ConfigError("features must be given on worker 0")
            plan = partition(features, labels, speeds=speeds, **settings)
            text = json.dumps(
                {
                    "method": plan.method,
                    "fingerprint": plan.fingerprint,
                    "metrics": plan.metrics,
                    "shape": [len(plan.parts), *plan.quota.shape],
                }
            )
        except Exception as error:  # told to everybody, or they would wait
            text = json.dumps({"error": str(error)})
    told = json.loads(comm.gather_text(text, SHARING)[0])
    if "error" in told:
        raise ConfigError(f"no shards: {told['error']}")
    count, num_classes, num_parts = told["shape"]
    tensors = [
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(num_classes * num_parts, dtype=torch.int64),
    ]
    if plan is not None:
        tensors = [torch.from_numpy(array.reshape(-1).copy()) for array in (plan.parts, plan.classes, plan.quota)]
    comm.broadcast_(tensors)
    if plan is not None:
        return plan
    parts, classes, quota = (tensor.numpy() for tensor in tensors)
    return ShardPlan(
        parts,
        classes,
        quota.reshape(num_classes, num_parts),
        tuple(map(float, speeds)),
        told["method"],
        settings["seed"],
        told["fingerprint"],
        told["metrics"],
        settings["columns"],
    )
