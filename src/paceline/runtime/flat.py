"""The trained state of a model as one flat fp32 vector on the host: parameters first, then floating-point buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.errors import ConfigError

KEPT = (torch.float32, torch.bfloat16, torch.float16)


class Flat:
    """Copies between a model and flat vectors. Frozen parameters are left out: they are the same everywhere.

    Buffers of other types (counters, float64) are left alone: every replica keeps its own.

    Args:
        module: the model.

    Attributes:
        length: values of parameters.
        tail: values of floating-point buffers (running statistics).
    """

    def __init__(self, module: torch.nn.Module) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, parameter in named:
            if parameter.dtype not in KEPT:
                raise ConfigError(
                    f"local training keeps its anchor in fp32, for parameters of float32, bfloat16 or float16: {name!r} is "
                    f"{parameter.dtype}. Freeze or convert it, or use sync='allreduce'"
                )
        self._parameters = [_in_memory_order(name, p.detach()) for name, p in named]
        self._buffers = [
            _in_memory_order(name, b) for name, b in module.named_buffers() if b.dtype in KEPT and b.numel()
        ]
        self.length = sum(view.numel() for view in self._parameters)
        self.tail = sum(view.numel() for view in self._buffers)
        self._device = next((view.device for view in self._parameters if view.device.type == "cuda"), None)
        self.on_cuda = self._device is not None

    def empty(self, count: int | None = None) -> torch.Tensor:
        """A vector for everything, or for `count` values; pinned where that makes copies faster."""
        return torch.zeros(self.length + self.tail if count is None else count, pin_memory=self.on_cuda)

    def _ranges(self, start: int, end: int, origin: int = 0) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """The pieces of parameters and buffers that lie in [start, end), and where each lies in the vector from `origin` on."""
        offset = 0
        for view in (*self._parameters, *self._buffers):
            low, high = max(start, offset), min(end, offset + view.numel())
            if low < high:
                yield view, slice(low - offset, high - offset), slice(low - origin, high - origin)
            offset += view.numel()

    def read(self, out: torch.Tensor, start: int, end: int, origin: int = 0) -> torch.cuda.Event | None:
        """Copy the model's [start, end) into `out`, whose first value is number `origin`.

        On CUDA the copy is under way until the event has passed.
        """
        for view, inner, outer in self._ranges(start, end, origin):
            out[outer].copy_(view[inner], non_blocking=True)
        if not self.on_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def fence(self) -> None:
        """Wait for what this thread has queued on the model's device."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def write(self, values: torch.Tensor, start: int, end: int, origin: int = 0) -> None:
        """Copy `values`, the first of which is number `origin`, into the model's [start, end)."""
        for view, inner, outer in self._ranges(start, end, origin):
            view[inner].copy_(values[outer])

    def add(self, values: torch.Tensor, start: int, end: int, origin: int = 0) -> None:
        """Add `values`, the first of which is number `origin`, to the model's [start, end)."""
        for view, inner, outer in self._ranges(start, end, origin):
            view[inner].add_(values[outer].to(view.device))

    def mix(self, values: torch.Tensor, start: int, end: int, part: float) -> None:
        """Move the model by `part` of the way to `values`."""
        for view, inner, outer in self._ranges(start, end):
            view[inner].lerp_(values[outer].to(view.device, view.dtype), part)


def _in_memory_order(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A flat view, whatever the memory format."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))
    straight = tensor.permute(order)
    if not straight.is_contiguous():
        raise ConfigError(
            f"local training needs dense tensors: {name!r} has strides {tensor.stride()}. Call .contiguous()"
        )
    return straight.view(-1)
