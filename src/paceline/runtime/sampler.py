"""Which samples this worker takes at each step."""

from __future__ import annotations

import dataclasses
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
        samples: used so far, over all epochs.
        over: the epoch has no further step.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    samples: int = 0
    over: bool = False

    def next_epoch(self) -> Cursor:
        """At the beginning of the epoch after this one."""
        return Cursor(epoch=self.epoch + 1, step=self.step, samples=self.samples)


class PlanSampler(torch.utils.data.Sampler[list[int]]):
    """A batch sampler: global step s takes the next B samples of the epoch's order, worker i its slice of them.

    The sequence of global batches depends on the order and on the batch of each step alone; the split only decides who computes
    which part. So each sample is used exactly once per epoch, through every change of batch, split and number of workers.

    A worker whose part is empty gets `ghost` samples of the same global batch, to be weighted 0: it takes part in the
    step's communication like everybody else.

    Args:
        order: the samples of each epoch.
        size: the global batch B, or (step, samples used so far) -> B.
        rank: which slice is ours.
        cut: (step, total) -> samples for each worker.
        drop_last: leave out what is left at the end of an epoch if it is less than the batch before it.
        ghost: how many samples an idle worker computes on.
    """

    def __init__(
        self,
        order: Order,
        size: int | Callable[[int, int], int],
        *,
        rank: int,
        cut: Cut,
        drop_last: bool = False,
        ghost: int = 1,
    ) -> None:
        self._order, self._rank, self._cut = order, rank, cut
        self._size: Callable[[int, int], int] = size if callable(size) else lambda step, samples: size
        self._drop_last, self._ghost = drop_last, ghost
        self.cursor = Cursor()
        self.next_step = 0

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, unless that very epoch is under way."""
        if epoch != self.cursor.epoch:
            self.cursor = Cursor(epoch=epoch, step=self.cursor.step, samples=self.cursor.samples)

    def begin(self, cursor: Cursor) -> None:
        """An epoch is about to begin, or to go on; it is over at once if it has not even one batch."""
        left = self._order.length(cursor.epoch) - cursor.position
        least = self._size(cursor.step, cursor.samples) if self._drop_last and not cursor.position else 1
        cursor.over = cursor.over or left < least

    def total(self, cursor: Cursor) -> tuple[int, int]:
        """The batch in force, and what of it the step at the cursor takes: less at the end of an epoch."""
        length = self._order.length(cursor.epoch)
        size = min(self._size(cursor.step, cursor.samples), length)
        return size, min(size, length - cursor.position)

    def split(self, cursor: Cursor) -> tuple[int, ...]:
        """What each worker takes at the cursor."""
        return self._cut(cursor.step, self.total(cursor)[1])

    def advance(self, cursor: Cursor, size: int, total: int) -> None:
        """A step with a batch of `total`, where `size` was in force, has been cut."""
        cursor.position += total
        cursor.step += 1
        cursor.samples += total
        left = self._order.length(cursor.epoch) - cursor.position
        cursor.over = left < (size if self._drop_last else 1)

    def __iter__(self) -> Iterator[list[int]]:
        """The index lists of this worker, from the cursor to the end of its epoch."""
        here = dataclasses.replace(self.cursor)
        self.next_step = here.step
        self.begin(here)
        while not here.over:
            size, total = self.total(here)
            split = self.split(here)
            assert sum(split) == total, (split, total)
            begin = here.position + sum(split[: self._rank])
            end = begin + split[self._rank]
            if begin == end:
                begin, end = here.position, here.position + min(self._ghost, total)
            self.advance(here, size, total)
            self.next_step = here.step
            yield self._order.indices(here.epoch, begin, end)

    def __len__(self) -> int:
        """Steps in a whole epoch, if the batch stays as it is."""
        length, size = self._order.length(self.cursor.epoch), self._size(self.cursor.step, self.cursor.samples)
        return length // size if self._drop_last else -(-length // size)
