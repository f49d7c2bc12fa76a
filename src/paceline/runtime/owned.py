"""Who owns which samples during a run: one plan, and how it changes between epochs and at a resume."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.comm import Comm
from paceline.config import Settings
from paceline.errors import CheckpointError, ConfigError
from paceline.events import EventLog
from paceline.runtime.sampler import Cursor
from paceline.runtime.shard_sampler import ShardSampler, check_room, wanted
from paceline.shards import Moves, ShardPlan
from paceline.types import Limits


def check_plan(
    plan: ShardPlan,
    settings: Settings,
    length: int,
    batch_size: int,
    size: int,
    accumulate: int,
    shuffle: bool,
    sampler: Any,
) -> None:
    """Refuse a plan that does not belong to this run, and what contradicts owned shards."""
    if len(plan.parts) != length:
        raise ConfigError(
            f"a plan belongs to the data it was made for: it has {len(plan.parts)} samples, this dataset {length}"
        )
    if plan.num_parts != size:
        raise ConfigError(
            f"shards belong to workers: the plan has {plan.num_parts} parts, this run {size} workers. Use plan.rebalance with one "
            f"speed per worker"
        )
    if settings.policy.per_epoch:
        raise ConfigError(
            f"balance={settings.policy.name!r} moves its own splits by what it sees, which owned shards do not follow: use 'affine', or "
            f"'equal' for shards that stay"
        )
    if batch_size < size:
        raise ConfigError(
            f"with owned shards the global batch must be at least one per worker: got {batch_size} for {size}"
        )
    if settings.batch_policy.name != "constant" or accumulate > 1:
        raise ConfigError(
            "owned shards go with a constant batch and without accumulate=: leave batch= and accumulate= out"
        )
    if sampler is not None or not shuffle:
        raise ConfigError("owned shards are shuffled by themselves: sampler= and shuffle=False cannot be given")


class Ownership:
    """One worker's view of the plan.

    Args:
        plan: who owns what to begin with.
        sampler: follows it.
        comm: the door to the other workers.
        limits: bounds on what a worker takes in a step.
        moved: called with a new plan and the moves that lead to it.
        log: where changes are noted.

    Attributes:
        plan: the one in force.
    """

    def __init__(
        self,
        plan: ShardPlan,
        sampler: ShardSampler,
        comm: Comm,
        limits: Limits,
        moved: Callable[[ShardPlan, Moves], None] | None,
        log: EventLog,
    ) -> None:
        self.plan, self._sampler, self._comm, self._limits = plan, sampler, comm, limits
        self._moved, self._log = moved or (lambda plan, moves: None), log
        problem = check_room(sampler.counts, sampler.steps, limits)
        if problem:
            raise ConfigError(
                f"shards must keep the bounds on a worker's batch: {problem}. Change speeds or batch_size"
            )

    def own(self) -> list[int]:
        """The samples of this worker's shard."""
        return self.plan.samples(self._comm.rank).tolist()

    def cut_anew(self, proposal: tuple[int, ...] | None, cursor: Cursor) -> bool:
        """Between two epochs: if speeds ask for other shards, worker 0 moves as few samples as possible, and tells the others.

        Returns:
            Whether the proposal was looked at.
        """
        sampler = self._sampler
        if proposal is None or not wanted(proposal, sampler.counts):
            return False
        parts = torch.from_numpy(sampler.parts.astype(np.int64))
        problem = ""
        if self._comm.rank == 0:
            try:
                found = self.plan.rebalance(proposal)[0].parts
                sizes = np.bincount(found, minlength=self._comm.size).tolist()
                problem = check_room(sizes, sampler.steps, self._limits)
                parts = torch.from_numpy(found.astype(np.int64))
            except Exception as error:
                problem = str(error)
        problem = self._comm.gather_text(problem, "cutting shards anew")[0]
        if problem:
            self._log.write("note", text=f"shards stay as they are: {problem}")
            return True
        self._comm.broadcast_([parts])
        self.plan, moves = self.plan.with_parts(parts.numpy(), proposal)
        sampler.own(self.plan.parts)
        self._log.write(
            "shards",
            step=cursor.step,
            epoch=cursor.epoch,
            moved=len(moves),
            fewest=moves.fewest,
            sizes=sampler.counts,
            reason=f"speeds ask for a split of {list(proposal)}",
        )
        self._moved(self.plan, moves)
        return True

    def state(self) -> dict[str, Any]:
        """What a resume needs."""
        return {"shards": torch.from_numpy(self.plan.parts.astype(np.int32)), "steps": self._sampler.steps}

    def load(self, state: dict[str, Any], *, whole: bool) -> None:
        """The shards of a checkpoint; on another number of workers only between epochs (`whole`)."""
        parts: NDArray[np.int64] = state["shards"].numpy().astype(np.int64)
        if not whole and state["steps"] != self._sampler.steps:
            raise CheckpointError(
                f"an epoch on shards goes on in as many steps as it began with: the checkpoint has {state['steps']}, this loader "
                f"{self._sampler.steps}. Use the same drop_last"
            )
        if int(parts.max()) + 1 > self._comm.size or len(np.unique(parts)) != self._comm.size:
            if not whole:
                raise CheckpointError(
                    f"shards of {int(parts.max()) + 1} workers are taken over by {self._comm.size} between epochs only: this "
                    f"checkpoint is in the middle of one"
                )
            self._log.write("note", text="saved with shards of other workers: this run goes on with its own plan")
            return
        counts = np.bincount(parts, minlength=self._comm.size)
        self.plan, moves = self.plan.with_parts(parts, tuple(int(count) for count in counts))
        self._sampler.own(parts)
        if len(moves):
            self._moved(self.plan, moves)


def digest(parts: NDArray[np.int64]) -> str:
    """A short digest of who owns what."""
    return hashlib.sha256(np.ascontiguousarray(parts.astype(np.int32)).tobytes()).hexdigest()[:16]
