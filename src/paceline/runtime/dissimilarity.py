"""How far do the gradients of shards lie apart? zeta^2 = sum_p w_p |grad F_p - grad F|^2 at the parameters of now.

Local training drifts by it, so it is what a partition should make small. A random division has about sigma^2 / n_p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data

from paceline.comm import Comm
from paceline.errors import ConfigError
from paceline.runtime.batches import to_device
from paceline.runtime.hook import WeightedSum
from paceline.runtime.model import PacedModel


def dissimilarity(
    fn: Callable[[Any], torch.Tensor],
    dataset: Any,
    *,
    comm: Comm,
    model: PacedModel,
    total: WeightedSum,
    device: torch.device,
    batch_size: int,
    **dataloader: Any,
) -> dict[str, float]:
    """Compare the gradients of all workers over the samples each has. Collective; nothing is changed.

    Args:
        fn: batch -> mean loss over it, through the wrapped model.
        dataset: this worker's samples.
        comm: the door to the other workers.
        model: the wrapped model; in eval mode meanwhile.
        total: the weighted sum, which has no part in this.
        device: where batches are moved.
        batch_size: samples per call of `fn`.
        dataloader: further arguments of DataLoader.

    Returns:
        `zeta2`, the squared length of the joint gradient as `square`, and `ratio`, one over the other.
    """
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    mean = torch.zeros(sum(p.numel() for p in parameters))
    count = len(dataset)
    modes = [(part, part.training) for part in model.modules()]
    if model.broadcast_buffers and total.scope == "all":
        comm.broadcast_(list(model.module.buffers()))
    at_outputs, total.at_outputs = total.at_outputs, False
    model.require_forward_param_sync = False
    model.eval()
    try:
        with model.no_sync():
            if count:
                for number, batch in enumerate(
                    torch.utils.data.DataLoader(dataset, batch_size, generator=torch.Generator(), **dataloader)
                ):
                    samples = min(batch_size, count - number * batch_size)
                    found = torch.autograd.grad(fn(to_device(batch, device)), parameters, allow_unused=True)
                    flat = [
                        torch.zeros_like(p).view(-1) if g is None else g.reshape(-1)
                        for p, g in zip(parameters, found, strict=True)
                    ]
                    mean.add_(torch.cat(flat).float().cpu(), alpha=samples / count)
    finally:
        for part, training in modes:
            part.training = training
        total.at_outputs = at_outputs
        model.require_forward_param_sync = True
        total.release()
    counts = comm.gather(torch.tensor([float(count)], dtype=torch.float64)).wait().view(-1).tolist()
    whole = sum(counts)
    if not whole:
        raise ConfigError("there must be samples to compare gradients on: no worker has any")
    weight = count / whole
    joint = mean * weight
    comm.sum_(joint).wait()
    away = weight * float((mean - joint).double().square().sum()) if count else 0.0
    parts = comm.gather(torch.tensor([away], dtype=torch.float64)).wait().view(-1).tolist()
    zeta2, square = sum(parts), float(joint.double().square().sum())
    return {"zeta2": zeta2, "square": square, "ratio": zeta2 / square if square else float("inf")}
