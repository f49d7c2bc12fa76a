"""`pace.step(fn, batch)`: a step handed over as a function, which survives running out of memory.

The worker computes the gradient of its share; if memory runs out, in forward or in backward, it drops what it has and
recomputes the share in smaller micro-batches, each weighted by its size, which sums to the same gradient. The others
merely wait in the sum.

DistributedDataParallel cannot start a backward over, so here gradients are summed by a small reducer of our own, under
`no_sync`: parameters in reverse order are grouped into buckets, each sent when backward has finished with it. A bucket sent
before memory ran out holds the share's whole gradient already and is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.runtime.batches import cut
from paceline.runtime.hook import WeightedSum
from paceline.runtime.memory import explain, is_out_of_memory
from paceline.runtime.model import PacedModel

BUCKET_BYTES = 25 * 2**20


class StepRunner:
    """Runs steps for one wrapped model.

    Where gradients are measured and this worker is alone, it computes its batch in two halves at least, and compares them.

    Args:
        model: from `Pace.wrap`.
        total: the weighted sum.
        recovered: called with (samples, samples that fit, number of micro-batches) after a recovery.
        fits: most samples that are known to fit at once.
    """

    def __init__(
        self,
        model: PacedModel,
        total: WeightedSum,
        recovered: Callable[[int, int, int], None],
        fits: int | None = None,
    ) -> None:
        self._model, self._total, self._recovered = model, total, recovered
        self._buckets = _bucketed([p for p in model.module.parameters() if p.requires_grad])
        self._bucket_of = {p: number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._missing: list[int] = []
        self._sent: list[tuple[torch.Tensor, Any]] = []
        self._sending = False
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        self.fits = fits
        self._half: list[torch.Tensor] | None = None

    def run(self, fn: Callable[[Any], torch.Tensor], batch: Any, samples: int) -> torch.Tensor:
        """Compute, sum and leave the gradients in place; returns the mean loss of this worker's share.

        Args:
            fn: batch -> mean loss over that batch; called with the whole share or with parts of it.
            batch: this worker's share.
            samples: how many samples `batch` holds.
        """
        self._sent = []
        # Once here, not in forward: a forward that runs out of memory is repeated, the broadcast must not be.
        if self._model.broadcast_buffers and self._total.scope == "all":
            self._total.comm.broadcast_(list(self._model.module.buffers()))
        self._model.require_forward_param_sync = False
        alone = self._total.comm.size == 1 and self._total.measures != "nothing" and samples > 1
        micro = min(samples, self.fits or samples, -(-samples // 2) if alone else samples)
        failed_at = 0
        while True:
            loss, error = self._attempt(fn, batch, samples, micro, halve=alone)
            if loss is not None:
                break
            failed_at = max(failed_at, micro)
            if micro == 1:
                assert error is not None
                raise error
            del error
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            micro = -(-micro // 2)
        if failed_at:
            self.fits = micro
            self._recovered(samples, micro, -(-samples // micro))
        self._collect()
        if self._half is not None:
            self._compare(samples, micro)
        self._model.require_forward_param_sync = True
        return loss

    def _attempt(
        self, fn: Callable[[Any], torch.Tensor], batch: Any, samples: int, micro: int, *, halve: bool
    ) -> tuple[torch.Tensor | None, BaseException | None]:
        parameters = list(self._bucket_of)
        self._half = None
        for parameter in parameters:
            parameter.grad = None
        loss = torch.zeros((), device=parameters[0].device)
        try:
            with self._model.no_sync():
                for begin in range(0, samples, micro):
                    if halve and begin == _middle(samples, micro):
                        self._half = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
                    part = cut(batch, begin, min(begin + micro, samples), samples)
                    self._sending = begin + micro >= samples
                    self._missing = [len(bucket) for bucket in self._buckets]
                    part_loss = fn(part) * (min(micro, samples - begin) / samples)
                    part_loss.backward()
                    loss += part_loss.detach()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            explain(error, self._total.comm.rank, self._total)
            if micro > 1:
                error = error.with_traceback(None)  # its frames hold the tensors that did not fit
            return None, error
        finally:
            self._sending = False
            self._total.release()
        return loss, None

    def _compare(self, samples: int, micro: int) -> None:
        """Tell the meter of both halves of a batch that one worker computed by itself."""
        assert self._half is not None
        first, self._half = self._half, None
        share = _middle(samples, micro) / samples
        whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._bucket_of]
        square, inner, joint = (
            sum((left.float() * right.float()).sum(dtype=torch.float64) for left, right in zip(one, other, strict=True))
            for one, other in ((first, first), (first, whole), (whole, whole))
        )
        rest = joint - 2 * inner + square
        parts = torch.stack(
            [
                torch.as_tensor(value, dtype=torch.float64, device=whole[0].device)
                for value in (
                    share * samples,
                    square / share**2,
                    inner / share,
                    (1 - share) * samples,
                    rest / (1 - share) ** 2,
                    (joint - inner) / (1 - share),
                )
            ]
        )
        self._total.meter.gradient([torch.as_tensor(joint).sqrt()], [], parts)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self._sending:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        self._sent.append((flat, self._total.send(flat)))

    def _collect(self) -> None:
        """Send what backward did not reach, wait for all sums, and put them in place."""
        while len(self._sent) < len(self._buckets):
            self._send()
        everything = list(self._bucket_of)
        used = torch.tensor([float(p.grad is not None) for p in everything], device=everything[0].device)
        counting = self._total.count(used)
        self._total.last_sent()
        self._total.finish()
        counting()
        for bucket, (flat, _) in zip(self._buckets, self._sent, strict=True):
            for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = piece.view_as(parameter)
        for parameter, times in zip(everything, used.tolist(), strict=True):
            if not times:
                parameter.grad = None  # nobody used it: as in one process, the optimizer skips it
        self._sent = []


def _middle(samples: int, micro: int) -> int:
    """Where the second half of the micro-batches begins."""
    return -(-samples // micro) // 2 * micro


def _bucketed(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters in reverse order (backward fills the last first), grouped by type and size."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for parameter in reversed(parameters):
        new = not buckets or size >= BUCKET_BYTES
        if new or (buckets[-1][0].dtype, buckets[-1][0].device) != (parameter.dtype, parameter.device):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets
