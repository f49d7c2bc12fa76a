"""`pace.loader`: a DataLoader that hands this worker its share of every global batch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from paceline.comm import Comm
from paceline.config import Settings
from paceline.errors import CheckpointError, ConfigError
from paceline.events import EventLog
from paceline.runtime import order as orders
from paceline.runtime import owned
from paceline.runtime.batches import to_device
from paceline.runtime.coordinator import Coordinator
from paceline.runtime.handshake import agree, fingerprint
from paceline.runtime.hook import WeightedSum
from paceline.runtime.meter import Meter
from paceline.runtime.owned import Ownership
from paceline.runtime.sampler import Cursor, PlanSampler
from paceline.runtime.shard_sampler import ShardSampler
from paceline.runtime.sizing import Sizing
from paceline.shards import Moves, ShardPlan
from paceline.types import Limits


class Loader:
    """Iterates over this worker's share of each global batch. Made by `Pace.loader`.

    Each `for` over it is one epoch. `epoch` is the number of the epoch under way or, between two, of the next one;
    after a resume in mid-epoch the first `for` goes on with exactly the samples that were left.

    Attributes:
        batch_size: the global batch to begin with; `batch` is the one in force.
        epoch: see above.
        step: the number of the next step, counted over all epochs.
        ends_epoch: whether the batch handed out last is the last of its epoch.
        ends_update: whether an optimizer step follows it.
        after_batch: called when the loop is done with a batch.
        length: samples in the first epoch.
        cap: most samples this worker can hold, if there is such a bound.
        before_batch: called with the number of a step and the global batch in force before it is handed out.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        comm: Comm,
        settings: Settings,
        total: WeightedSum,
        meter: Meter,
        log: EventLog,
        device: torch.device,
        shuffle: bool = True,
        sampler: Any = None,
        drop_last: bool = False,
        accumulate: int = 1,
        partition: ShardPlan | None = None,
        moved: Callable[[ShardPlan, Moves], None] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        **dataloader: Any,
    ) -> None:
        length = _checked_length(dataset, batch_size, drop_last, accumulate, dataloader, sampler)
        if partition is not None:
            owned.check_plan(partition, settings, length, batch_size, comm.size, accumulate, shuffle, sampler)
        if sampler is not None:
            order: orders.Order = orders.FromSampler(sampler)
        else:
            order = orders.Shuffled(length, settings.seed) if shuffle else orders.Sequential(length)
        self._comm, self._total, self._meter, self._log = comm, total, meter, log
        self._device = device
        self._order, self._own_order = order, sampler is not None
        self.batch_size = batch_size
        horizon = num_workers * (prefetch_factor or 2)
        self._identity = {"length": length, "fingerprint": fingerprint(dataset)}
        everybody = agree(
            comm,
            "dataset, batch size and order of samples",
            {
                **self._identity,
                "batch_size": batch_size,
                "drop_last": drop_last,
                "accumulate": accumulate,
                "first_order": orders.digest(order, 0),
                "shards": None if partition is None else owned.digest(partition.parts),
                "_horizon": horizon,
                "_cap": _own_cap(settings, comm),
            },
        )
        self._order_agreed = 0
        self.cap = everybody[comm.rank]["_cap"]
        limits = Limits.of(
            comm.size,
            lower=settings.min_local_batch,
            cap=tuple(one["_cap"] for one in everybody),
            granularity=settings.granularity,
        )
        self._planned = settings.batch_policy.planned
        first = self._planned(0, 0)
        self.length = order.length(0)
        sizing = Sizing(settings.batch_policy, batch_size if first is None else first, self.length, log)
        _check_batch(settings, limits, batch_size, self.length, accumulate)
        self.coordinator = Coordinator(
            comm,
            settings.policy,
            limits,
            sizing,
            every=settings.replan_every,
            horizon=max(one["_horizon"] for one in everybody),
            log=log,
            meter=meter,
            align=accumulate,
        )
        self._owned: Ownership | None = None
        self._sampler: PlanSampler | ShardSampler
        if partition is None:
            self._sampler = PlanSampler(
                order, self._size, rank=comm.rank, cut=self._cut, drop_last=drop_last, ghost=settings.min_local_batch
            )
        else:
            shards = self._sampler = ShardSampler(
                partition.parts,
                comm.size,
                batch_size,
                rank=comm.rank,
                seed=settings.seed,
                drop_last=drop_last,
                ghost=settings.min_local_batch,
            )
            self.coordinator.owned = shards.usual
            self._owned = Ownership(partition, shards, comm, limits, moved, log)
        self.ends_epoch = self.ends_update = False
        self.after_batch: Callable[[], None] = lambda: None
        self.before_batch: Callable[[int, int], None] = lambda step, size: None
        self._seed = settings.seed
        self._generator = torch.Generator()
        self._left: Cursor | None = None
        self._loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=self._sampler,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            generator=self._generator,
            **dataloader,
        )
        log.write(
            "data",
            **self._identity,
            batch_size=batch_size,
            steps_per_epoch=len(self),
            horizon=max(one["_horizon"] for one in everybody),
            limits=limits,
        )

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one."""
        return self._sampler.cursor.epoch

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._sampler.cursor.step

    @property
    def samples(self) -> int:
        """Samples handed out so far, to all workers, over all epochs."""
        return self._sampler.cursor.samples

    @property
    def batch(self) -> int:
        """The global batch of the next step."""
        return self._size(self.step, self.samples)

    @property
    def shards(self) -> ShardPlan | None:
        """The plan of owned shards, if there is one; it may change between epochs."""
        return None if self._owned is None else self._owned.plan

    @property
    def split(self) -> tuple[int, ...]:
        """How the next full global batch will be divided."""
        cursor = self._sampler.cursor
        return self._cut(cursor.step, self.batch) if self._owned is None else self._sampler.split(cursor)

    @property
    def sampler(self) -> PlanSampler | ShardSampler:
        """The batch sampler underneath; code written for DDP calls its `set_epoch`."""
        return self._sampler

    def owned(self) -> torch.utils.data.Dataset[Any]:
        """The samples of this worker's shard."""
        assert self._owned is not None
        return torch.utils.data.Subset(self._loader.dataset, self._owned.own())

    def next_ends_epoch(self) -> bool:
        """Whether the next batch, if it is as large as is known now, is the last of its epoch."""
        cursor = dataclasses.replace(self._sampler.cursor)
        if not cursor.over:
            self._sampler.advance(cursor, *self._sampler.total(cursor))
        return cursor.over

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, unless that very epoch is to be resumed."""
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Steps in an epoch, if the batch stays as it is."""
        return len(self._sampler)

    def _size(self, step: int, samples: int) -> int:
        planned = self._planned(step, samples)
        return planned if planned is not None else self.coordinator.book.at(step).total

    def _cut(self, step: int, total: int) -> tuple[int, ...]:
        return self.coordinator.book.at(step).cut(total)

    def __iter__(self) -> Iterator[Any]:
        """One epoch of batches, or what is left of the one that was interrupted by a save."""
        self._begin()
        cursor = self._sampler.cursor
        batches = iter(self._loader)
        finished = False
        try:
            self._sampler.begin(cursor)
            while not cursor.over:
                self._comm.at(cursor.step, "waiting for data")
                self._turn(cursor)
                batch = self._fetch(batches, cursor)
                size, total = self._sampler.total(cursor)
                plan = self.coordinator.book.at(cursor.step)
                split = self._sampler.split(cursor)
                mine = split[self._comm.rank]
                self._meter.batch(cursor.step, mine, full=total == size)
                weights = plan.weights(split)
                of_node = sum(weights[mate] for mate in self._total.mates)
                self._total.weigh(weights[self._comm.rank], cursor.step, mine, of_node)
                self._comm.at(cursor.step, "computing")
                self.before_batch(cursor.step, self._size(cursor.step, cursor.samples))
                self._sampler.advance(cursor, size, total)
                self.ends_epoch = cursor.over
                self.ends_update = self.ends_epoch or self.coordinator.aligned(cursor.step)
                yield batch
                self.after_batch()
                self._meter.fetch()
            finished = True
        finally:
            if not finished:
                self._meter.drop()
            if self._sampler.cursor is cursor:
                self._end(cursor, finished)

    def _turn(self, cursor: Cursor) -> None:
        newest = self.coordinator.book.latest
        planned = self._planned(cursor.step, cursor.samples)
        if planned is not None:
            self.coordinator.follow(cursor.step, planned)
        self.coordinator.turn(cursor.step, cursor.epoch)
        if self.coordinator.book.latest is not newest:
            assert self.coordinator.book.latest.start >= self._sampler.next_step, (
                "a plan must not reach into cut batches"
            )

    def _fetch(self, batches: Iterator[Any], cursor: Cursor) -> Any:
        try:
            return to_device(next(batches), self._device)
        except StopIteration:
            raise AssertionError(f"the data ended before step {cursor.step} of epoch {cursor.epoch}") from None
        except Exception as error:
            error.add_note(
                f"paceline: worker {self._comm.rank} could not load its share of step {cursor.step} "
                f"(epoch {cursor.epoch}); the dataset raised the error above"
            )
            raise

    def _begin(self) -> None:
        self.after_batch()  # of a batch the loop was left at
        if self._left is self._sampler.cursor:  # the loop was left before the epoch's end: the next one begins
            self._sampler.cursor = self._left.next_epoch()
        cursor = self._sampler.cursor
        if self._own_order and cursor.epoch > self._order_agreed:
            agree(self._comm, "order of samples", {"order": orders.digest(self._order, cursor.epoch)})
            self._order_agreed = cursor.epoch
        mixed = hashlib.sha256(f"{self._seed} {cursor.epoch} {self._comm.rank}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(mixed[:8], "little") % 2**63)
        self._total.release()
        if cursor.position == 0:
            self.coordinator.begin_epoch(cursor.step)
            if self._owned is not None and cursor.epoch and self._owned.cut_anew(self.coordinator.proposal, cursor):
                self.coordinator.proposal = None
        self._meter.fetch()

    def _end(self, cursor: Cursor, finished: bool) -> None:
        self._left = None if finished else cursor
        if finished:
            self.coordinator.turn(cursor.step, cursor.epoch, ends_epoch=True)
            self._log.write("epoch", epoch=cursor.epoch, step=cursor.step, samples=cursor.position)
            self._sampler.cursor = cursor.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in the data, and what it has learned about the workers' speed."""
        cursor = self._sampler.cursor
        return {
            **self._identity,
            "batch_size": self.batch_size,
            "epoch": cursor.epoch,
            "position": cursor.position,
            "step": cursor.step,
            "samples": cursor.samples,
            "over": cursor.over,
            "order": orders.digest(self._order, cursor.epoch),
            "balance": self.coordinator.state(),
            **({"shards": None, "steps": 0} if self._owned is None else self._owned.state()),
        }

    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any] | None = None) -> None:
        """Go on where `state` was taken, on any number of workers.

        Args:
            state: from `state_dict`.
            own: this worker's part, if it was saved by as many workers.
        """
        for name in ("length", "fingerprint", "batch_size"):
            mine = self.batch_size if name == "batch_size" else self._identity[name]
            if state[name] != mine:
                raise CheckpointError(
                    f"a checkpoint resumes on the dataset it was made on: it has {name}={state[name]!r}, this loader "
                    f"{name}={mine!r}"
                )
        epoch, position = state["epoch"], state["position"]
        if orders.digest(self._order, epoch) != state["order"]:
            raise CheckpointError(
                f"the order of samples in epoch {epoch} differs from the one in the checkpoint: use the same seed, "
                f"shuffle and sampler"
            )
        cursor = Cursor(epoch, position, state["step"], state["samples"], state["over"])
        if (state["shards"] is None) != (self._owned is None):
            raise CheckpointError(
                "a run on owned shards resumes on owned shards, one without them without: see partition="
            )
        if self._owned is not None:
            self._owned.load(state, whole=position == 0 or state["over"])
        self._sampler.cursor = cursor
        note = self.coordinator.load(state["balance"], own, state["step"])
        if note:
            self._log.write("note", text=note)
        if cursor.over:  # saved after the last step of an epoch: end it as the loop would have
            self._meter.fetch()
            self._end(cursor, finished=True)


def _check_batch(settings: Settings, limits: Limits, batch_size: int, length: int, accumulate: int) -> None:
    policy = settings.batch_policy
    if policy.needs != "nothing" and settings.policy.weighting != "share":
        raise ConfigError(
            f"batch={policy.name!r} measures gradients weighted by samples, balance={settings.policy.name!r} takes their plain mean: "
            f"use another balance policy"
        )
    if accumulate > 1 and policy.name != "constant":
        raise ConfigError(
            f"batch={policy.name!r} changes the global batch, accumulate={accumulate} counts batches of one size: leave accumulate "
            f"out. Beyond a worker's memory pace.step cuts shares into micro-batches by itself"
        )
    points = getattr(policy, "points", ())
    if points and points[0][1] != batch_size:
        raise ConfigError(f"a schedule begins with the loader's batch_size={batch_size}; got {points[0][1]}")
    for _, batch in points:
        if batch > length:
            raise ConfigError(f"a schedule's batches must not exceed the dataset: got {batch} for {length} samples")
        limits.check(batch)


def _own_cap(settings: Settings, comm: Comm) -> int | None:
    cap = settings.max_local_batch
    if isinstance(cap, tuple):
        if len(cap) != comm.size:
            raise ConfigError(
                f"max_local_batch must be one number or one per worker: got {len(cap)} numbers for {comm.size} workers"
            )
        return cap[comm.rank]
    return cap


def _checked_length(
    dataset: Any, batch_size: Any, drop_last: bool, accumulate: int, dataloader: dict[str, Any], sampler: Any
) -> int:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"pace.loader needs a map-style dataset (with __getitem__ and __len__), got {type(dataset).__name__}: without "
            f"indices nobody can promise that each sample is used exactly once"
        )
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigError(f"batch_size is the global batch and must be a whole number, at least 1; got {batch_size!r}")
    if accumulate < 1:
        raise ConfigError(f"accumulate must be at least 1, got {accumulate}")
    if not dataloader.get("in_order", True):
        raise ConfigError("in_order=False cannot be given: a batch's weight belongs to its place in the order")
    for name in ("batch_sampler", "generator"):
        if name in dataloader:
            raise ConfigError(
                f"pace.loader cuts the batches itself: {name}= cannot be given. Use sampler= for an order"
            )
    length = len(dataset)
    if length == 0:
        raise ConfigError("the dataset must not be empty: it has length 0")
    if drop_last and batch_size > length and sampler is None:
        raise ConfigError(
            f"with drop_last the global batch must not exceed the dataset: got batch_size={batch_size} for {length} "
            f"samples, which leaves no step at all"
        )
    return length
