"""Training on owned shards: which samples of its own each worker takes at each step.

An epoch has the same number of steps S for everybody. After s of them worker i has used floor(s n_i / S) of its n_i samples, so batches
follow the sizes of shards, and each sample is used once. The order within a shard is a permutation per (seed, epoch, shard).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.runtime.order import Shuffled
from paceline.runtime.sampler import Cursor
from paceline.types import Limits


class ShardSampler(torch.utils.data.Sampler[list[int]]):
    """A batch sampler over owned shards; what `PlanSampler` is for shared data.

    Args:
        parts: the shard of every sample; shard i belongs to worker i.
        size: how many workers.
        batch_size: the global batch.
        rank: which shard is ours.
        seed: of the orders.
        drop_last: make batches no smaller than `batch_size`; else no larger, on the mean.
        ghost: how many samples a worker without any at a step computes on.
    """

    def __init__(
        self,
        parts: NDArray[np.int64],
        size: int,
        batch_size: int,
        *,
        rank: int,
        seed: int,
        drop_last: bool = False,
        ghost: int = 1,
    ) -> None:
        self._size, self._batch_size, self._rank, self._seed = size, batch_size, rank, seed
        self._drop_last, self._ghost = drop_last, ghost
        self.cursor = Cursor()
        self.next_step = 0
        self.own(parts)

    def own(self, parts: NDArray[np.int64]) -> None:
        """From the next epoch on, shards are these."""
        counts = np.bincount(parts, minlength=self._size)
        if len(counts) > self._size:
            raise ConfigError(
                f"shards belong to workers: the plan has {len(counts)} parts, this run {self._size} workers. Rebalance it to "
                f"{self._size} parts"
            )
        if not counts.all():
            raise ConfigError(
                f"every worker must own samples: shard {int(counts.argmin())} is empty. Give its worker a speed above 0"
            )
        self.parts = parts
        self.counts = [int(count) for count in counts]
        self._own = np.flatnonzero(parts == self._rank)
        mixed = hashlib.sha256(f"{self._seed} shard {self._rank}".encode()).digest()
        self._order = Shuffled(len(self._own), int.from_bytes(mixed[:7], "little"))
        self.steps = steps_of(len(parts), self._batch_size, self._drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, unless that very epoch is under way."""
        if epoch != self.cursor.epoch:
            self.cursor = Cursor(epoch=epoch, step=self.cursor.step, samples=self.cursor.samples)

    def _turn(self, position: int) -> int:
        """How many steps of the epoch have used so many samples."""
        low, high = 0, self.steps
        while low < high:
            middle = (low + high) // 2
            if sum(middle * count // self.steps for count in self.counts) < position:
                low = middle + 1
            else:
                high = middle
        return low

    def begin(self, cursor: Cursor) -> None:
        """An epoch is about to begin, or to go on."""
        cursor.over = cursor.over or self._turn(cursor.position) >= self.steps

    def usual(self) -> tuple[int, ...]:
        """What each worker takes of its own in a step, on the mean."""
        return tuple(max(1, round(count / self.steps)) for count in self.counts)

    def split(self, cursor: Cursor) -> tuple[int, ...]:
        """What each worker takes of its own at the cursor."""
        turn = self._turn(cursor.position)
        return tuple((turn + 1) * count // self.steps - turn * count // self.steps for count in self.counts)

    def total(self, cursor: Cursor) -> tuple[int, int]:
        """The batch at the cursor, twice: none is short."""
        total = sum(self.split(cursor))
        return total, total

    def advance(self, cursor: Cursor, size: int, total: int) -> None:
        """A step has been cut."""
        cursor.position += total
        cursor.step += 1
        cursor.samples += total
        cursor.over = cursor.position >= len(self.parts)

    def __iter__(self) -> Iterator[list[int]]:
        """The index lists of this worker, from the cursor to the end of its epoch."""
        here = dataclasses.replace(self.cursor)
        self.next_step = here.step
        self.begin(here)
        count = self.counts[self._rank]
        while not here.over:
            turn = self._turn(here.position)
            begin, end = turn * count // self.steps, (turn + 1) * count // self.steps
            if begin == end:
                begin = min(begin, count - 1)
                end = min(begin + self._ghost, count)
            self.advance(here, 0, sum(self.split(here)))
            self.next_step = here.step
            yield self._own[self._order.indices(here.epoch, begin, end)].tolist()

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.steps


def steps_of(count: int, batch_size: int, drop_last: bool) -> int:
    """Steps in an epoch of so many samples."""
    return max(1, count // batch_size if drop_last else -(-count // batch_size))


def check_room(counts: Sequence[int], steps: int, limits: Limits) -> str:
    """Why shards of these sizes do not keep the bounds on what workers take in a step; empty if they do."""
    for worker, count in enumerate(counts):
        if not count:
            return f"worker {worker} would own nothing"
        if -(-count // steps) > limits.cap[worker]:
            return f"worker {worker} would take {-(-count // steps)} samples a step, max_local_batch is {limits.cap[worker]}"
        if 1 < limits.lower[worker] > count // steps:
            return (
                f"worker {worker} would take {count // steps} samples a step, min_local_batch is {limits.lower[worker]}"
            )
    return ""


def wanted(proposal: Sequence[int] | None, counts: Sequence[int], gain: float = 0.02) -> bool:
    """Whether shards should be cut anew: some worker would own `gain` more or less, and more than a proposal's rounding."""
    if proposal is None or not sum(proposal):
        return False
    total, whole = sum(proposal), sum(counts)
    return any(
        abs(share / total * whole - count) > max(gain * count, whole / total, 1.0)
        for share, count in zip(proposal, counts, strict=True)
    )
