"""The model as paceline wraps it: DistributedDataParallel with the weighted sum, and errors that name the missing."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import Comm
from paceline.errors import ConfigError
from paceline.runtime.hook import WeightedSum
from paceline.runtime.memory import explain, is_out_of_memory


class PacedModel(DistributedDataParallel):
    """DistributedDataParallel whose gradients are summed by share. Made by `Pace.wrap`.

    Args:
        module: the model, on this worker's device.
        comm: the door to the other workers.
        total: the weighted sum.
        ddp: further arguments of DistributedDataParallel.
    """

    def __init__(self, module: torch.nn.Module, comm: Comm, total: WeightedSum, **ddp: Any) -> None:
        super().__init__(module, process_group=comm.group(), **ddp)
        self._paceline_comm, self._paceline_total = comm, total
        total.attach(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward; buffers are broadcast first, as DistributedDataParallel does."""
        try:
            with self._paceline_comm.naming("the broadcast of buffers before forward"):
                return super().forward(*inputs, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                explain(error, self._paceline_comm.rank, self._paceline_total)
            raise


def wrap(model: torch.nn.Module, comm: Comm, total: WeightedSum, device: torch.device, **ddp: Any) -> PacedModel:
    """Check a model and wrap it.

    Raises:
        ConfigError: nothing to train, or parameters on another device than this worker's.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            f"the model must have at least one trainable parameter: {type(model).__name__} has none. Set requires_grad on "
            f"those to be trained before pace.wrap"
        )
    elsewhere = {str(parameter.device) for parameter in trainable if parameter.device.type != device.type}
    if elsewhere:
        raise ConfigError(
            f"the model must be on this worker's device {device}, but parameters are on {', '.join(sorted(elsewhere))}: "
            f"call model.to(pace.device) before pace.wrap"
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("pace.wrap takes the plain model: this one is in DistributedDataParallel already")
    if device.type == "cuda":
        ddp.setdefault("device_ids", [device.index])
    with comm.naming("comparing the model over all workers"):
        return PacedModel(model, comm, total, **ddp)
