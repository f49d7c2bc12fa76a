"""The model as paceline wraps it: DistributedDataParallel with the weighted sum, and errors that name the missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import Comm
from paceline.errors import ConfigError
from paceline.runtime.compress import HalfSum
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
        total.at_outputs = any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
        # After its first backward DDP lays its buckets out anew, by the order in which gradients became ready, and where a
        # value lies in a bucket decides in which order the backend sums it. A resume needs that order for the same bits.
        self.gradient_order: list[int] = []
        norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._NormBase)]
        statistics = {id(buffer) for part in norms for buffer in part.buffers(recurse=False)}
        only_statistics = all(id(buffer) in statistics for buffer in module.buffers())
        self._norms = norms if only_statistics else None
        self.needs_several = any(
            isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(part, torch.nn.SyncBatchNorm)
            for part in norms
        )
        self._trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._recording: list[Any] = []
        if not (ddp.get("find_unused_parameters") or ddp.get("static_graph")):
            for number, parameter in enumerate(self._trainable):
                self._recording.append(parameter.register_post_accumulate_grad_hook(self._record(number)))

    def _record(self, number: int) -> Callable[[torch.Tensor], None]:
        def became_ready(_: torch.Tensor) -> None:
            if self.require_backward_grad_sync:
                self.gradient_order.append(number)
                if len(self.gradient_order) == len(self._trainable):
                    for handle in self._recording:
                        handle.remove()

        return became_ready

    def lay_out(self, order: list[int]) -> None:
        """Let DDP lay its buckets out by `order`: one backward of zeros, in that order. Collective; before any step."""
        if not self._recording or self.gradient_order or sorted(order) != list(range(len(self._trainable))):
            return
        self.reducer.prepare_for_forward()
        self.reducer.prepare_for_backward([])
        for number in order:
            (self._trainable[number] * 0).sum().backward()
        for parameter in self._trainable:
            parameter.grad = None

    def _sync_buffers(self) -> None:
        """DDP's broadcast of buffers, with errors that name the missing.

        Running statistics of batch normalisation are read in evaluation only (or by layers frozen with `eval()`), so where
        a model has no other buffers they are sent then, and not before every training step.
        """
        if self._paceline_total.scope != "all":
            return  # replicas differ, and so do their buffers until they agree
        if self._norms is not None and all(part.training for part in self._norms):
            return
        with self._paceline_comm.naming("the broadcast of buffers before forward"):
            super()._sync_buffers()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward; buffers are broadcast first, as DistributedDataParallel does."""
        try:
            outputs = super().forward(*inputs, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                explain(error, self._paceline_comm.rank, self._paceline_total)
            raise
        if self._paceline_total.at_outputs and torch.is_grad_enabled():
            return self._paceline_total.scale_outputs(outputs)
        return outputs


COMPRESSIONS = (None, "bf16")
# Gradients of GPUs that go through host memory: several exchanges side by side fill the machine's copy engines and cores,
# and small buckets leave little to send once backward is over. Measured on four processes that share one GPU over gloo,
# ResNet-18: 53 ms a step with one lane and 25 MB, 48 ms with 1 MB, 37 ms with three lanes and 1 or 2 MB.
STAGED_LANES = 3
STAGED_BUCKET_MB = 2


def wrap(
    model: torch.nn.Module,
    comm: Comm,
    total: WeightedSum,
    device: torch.device,
    compress: str | None = None,
    **ddp: Any,
) -> PacedModel:
    """Check a model and wrap it. Collective.

    Raises:
        ConfigError: nothing to train, parameters on another device than this worker's, or no such compression.
    """
    if compress not in COMPRESSIONS:
        raise ConfigError(f"compress must be None or 'bf16', got {compress!r}")
    if compress and comm.backend != "gloo":
        raise ConfigError(f"compress='bf16' works over gloo; this run's backend is {comm.backend}. Leave compress out")
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
    ddp.setdefault("gradient_as_bucket_view", True)  # two copies of all gradients less in every step
    if comm.staged:
        comm.open_lanes(STAGED_LANES)
        ddp.setdefault("bucket_cap_mb", STAGED_BUCKET_MB)
    if compress and comm.size > 1:
        total.half = HalfSum(comm)
    with comm.naming("comparing the model over all workers"):
        return PacedModel(model, comm, total, **ddp)
