"""Batches as collate functions make them: tensors in lists, tuples, named tuples and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from paceline.errors import PacelineError


def each_tensor(batch: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """The same batch with `fn` applied to every tensor; what is no tensor stays as it is."""
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    if type(batch) is dict:
        return {name: each_tensor(value, fn) for name, value in batch.items()}
    if isinstance(batch, MutableMapping):  # a subclass, or a class of its own, stays what it is
        changed = copy.copy(batch)
        for name, value in batch.items():
            changed[name] = each_tensor(value, fn)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(value, fn) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(each_tensor(value, fn) for value in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on `device`; pinned tensors travel while the program goes on."""
    if device.type == "cpu":
        return batch
    if not isinstance(batch, torch.Tensor) and hasattr(batch, "to"):  # batch classes of other libraries know how
        return batch.to(device)
    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def num_samples(batch: Any) -> int:
    """The length of the first tensor in a batch; 0 if there is none."""
    found: list[int] = []
    each_tensor(batch, lambda tensor: found.append(int(tensor.shape[0])) if tensor.dim() else None)
    return found[0] if found else 0


def cut(batch: Any, begin: int, end: int, samples: int) -> Any:
    """Samples begin .. end - 1 of a batch; lists with one item per sample are cut too."""
    if begin == 0 and end == samples:
        return batch
    if isinstance(batch, torch.Tensor):
        if batch.dim() and batch.shape[0] == samples:
            return batch[begin:end]
        raise PacelineError(
            f"pace.step can cut a batch only along the first dimension of its tensors: expected {samples} there, got a "
            f"tensor of shape {tuple(batch.shape)}"
        )
    if isinstance(batch, dict):
        return {name: cut(value, begin, end, samples) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(value, begin, end, samples) for value in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == samples and not any(isinstance(item, torch.Tensor) and item.dim() for item in batch):
            return batch[begin:end]
        return type(batch)(cut(value, begin, end, samples) for value in batch)
    raise PacelineError(
        f"pace.step can cut tensors, lists, tuples and dicts into micro-batches, got {type(batch).__name__}"
    )
