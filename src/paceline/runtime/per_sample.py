"""Gradients of single samples, through `torch.func`: the definition that cheaper measurements are held against.

It needs a gradient per sample in memory: for small models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.policies.batch import Gradients


def per_sample(
    module: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], inputs: Any, targets: Any
) -> Gradients:
    """What a batch policy sees, with every sample a part of its own.

    Args:
        module: the plain model, without layers that mix samples (batch normalisation in training mode).
        loss: (outputs, targets) -> mean loss over a batch.
        inputs: a batch.
        targets: theirs.
    """
    from torch.func import functional_call, grad, vmap

    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    others = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    others |= dict(module.named_buffers())

    def of_one(parameters: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        outputs = functional_call(module, {**parameters, **others}, (one.unsqueeze(0),))
        return loss(outputs, target.unsqueeze(0))

    found = vmap(grad(of_one), in_dims=(None, 0, 0))(trained, inputs, targets)
    rows = torch.cat([value.flatten(1) for value in found.values()], dim=1).double()
    mean = rows.mean(0)
    return Gradients(
        step=0,
        total=len(rows),
        most=len(rows),
        sizes=(1.0,) * len(rows),
        squares=tuple(rows.square().sum(1).tolist()),
        joint=float(mean @ mean),
        inner=tuple((rows @ mean).tolist()),
    )
