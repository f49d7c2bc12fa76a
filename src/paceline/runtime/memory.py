"""Out of memory: knowing it when it happens, and saying what to do."""

from __future__ import annotations

from typing import Any

import torch

_SIGNS = ("defaultcpuallocator", "can't allocate memory", "cublas_status_alloc_failed", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def explain(error: BaseException, rank: int, total: Any) -> None:
    """Add to an out-of-memory error which batch did not fit and what to set."""
    if any("max_local_batch" in note for note in getattr(error, "__notes__", ())):
        return
    samples = total.samples
    error.add_note(
        f"paceline: worker {rank} ran out of memory at step {total.step} on its share of {samples} samples. Set "
        f"max_local_batch to fewer (one number, or one per worker), or hand the step over with pace.step(fn, batch), "
        f"which recovers"
    )
