"""Which samples this worker takes at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.utils.data

from paceline.runtime.order import Order

Cut = Callable[[int, int], tuple[int, ...]]


@dataclass
class Cursor:
    """Where the run stands in the data; all the state a sampler has.

    Args:
        epoch: the epoch under way.
        position: samples of it already used, by all workers together.
        step: the number of the next step, counted over all epochs.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0


class PlanSampler(torch.utils.data.Sampler[list[int]]):
    """A batch sampler: global step s takes the next B samples of the epoch's order, worker i its slice of them.

    The sequence of global batches depends on the order alone; the split only decides who computes which part. So each
    sample is used exactly once per epoch, through every change of the split and of the number of workers.

    A worker whose part is empty gets `ghost` samples of the same global batch, to be weighted 0: it takes part in the
    step's communication like everybody else.

    Args:
        order: the samples of each epoch.
        batch_size: the global batch B.
        rank: which slice is ours.
        cut: (step, total) -> samples for each worker.
        drop_last: leave out the short last batch.
        ghost: how many samples an idle worker computes on.
    """

    def __init__(
        self, order: Order, batch_size: int, *, rank: int, cut: Cut, drop_last: bool = False, ghost: int = 1
    ) -> None:
        self._order, self._batch_size, self._rank, self._cut = order, batch_size, rank, cut
        self._drop_last, self._ghost = drop_last, ghost
        self.cursor = Cursor()
        self.next_step = 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, unless that very epoch is under way."""
        if epoch != self.cursor.epoch:
            self.cursor = Cursor(epoch=epoch, step=self.cursor.step)

    def end(self, epoch: int) -> int:
        """How many samples of the epoch are used."""
        length = self._order.length(epoch)
        return length - length % self._batch_size if self._drop_last else length

    def totals(self, epoch: int, position: int) -> Iterator[int]:
        """The global batch of each step from `position` to the end of the epoch."""
        end = self.end(epoch)
        while position < end:
            total = min(self._batch_size, end - position)
            yield total
            position += total

    def __iter__(self) -> Iterator[list[int]]:
        """The index lists of this worker, from the cursor to the end of its epoch."""
        epoch, position = self.cursor.epoch, self.cursor.position
        self.next_step = self.cursor.step
        for total in self.totals(epoch, position):
            split = self._cut(self.next_step, total)
            assert sum(split) == total, (split, total)
            self.next_step += 1
            begin = position + sum(split[: self._rank])
            end = begin + split[self._rank]
            if begin == end:
                begin, end = position, position + min(self._ghost, total)
            yield self._order.indices(epoch, begin, end)
            position += total

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        return -(-self.end(self.cursor.epoch) // self._batch_size)
