"""From measured gradients to the size of the global batch: what a batch policy sees, and what it has decided.

While gradients are summed over everybody, each worker's own norm and that of the sum travel with the times of its steps, and every
worker sees the same numbers. In local training replicas stand at the same parameters only when a round begins: a sketch of that
step's gradient is gathered while the round goes on, and read when it ends (or, as published, one of its last step).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.comm import Comm, PendingGather
from paceline.errors import ConfigError
from paceline.events import EventLog
from paceline.policies.batch import AnyBatch, Gradients, Size
from paceline.runtime.meter import StepTimes, total
from paceline.runtime.sketch import WIDTH, Sketch
from paceline.types import from_plain, to_plain

SLOT = 5  # step, samples, squared norm, inner product, squared norm of the sum
PARTS = 2  # of one worker's step, at most


@dataclass(frozen=True, slots=True)
class Sketches:
    """Gradients of all replicas at one step, as sketches.

    Args:
        step: the step.
        samples: of each replica, that its gradient is the mean of.
        rows: a sketch of each.
        exchange_s: what the round's exchange added to each of its steps.
    """

    step: int
    samples: list[float]
    rows: list[list[float]]
    exchange_s: float = 0.0


class Sizing:
    """One worker's part in deciding the batch.

    Args:
        policy: decides.
        first: the global batch to begin with.
        length: samples in an epoch.
        log: where warnings go.

    Attributes:
        total: the newest decision.
        noise: the gradient noise scale as far as known.
    """

    def __init__(self, policy: AnyBatch, first: int, length: int, log: EventLog) -> None:
        bound = getattr(policy, "most", None)
        if bound is not None and bound > length:
            raise ConfigError(
                f"most must not exceed the dataset, or the bound means nothing: got most={bound} for {length} samples"
            )
        self.policy, self.total, self.length, self._log = policy, first, length, log
        self._first = first
        self.state: Any = policy.init()
        self.noise: float | None = None
        self._warned: set[str] = set()

    @property
    def largest(self) -> int:
        """The largest batch that is known to come."""
        return max([self.total, *(batch for _, batch in getattr(self.policy, "points", ()))])

    @property
    def measures(self) -> bool:
        """Whether gradients are looked at."""
        return self.policy.needs != "nothing"

    def numbers(self, every: int) -> int:
        """How many numbers a worker sends for `every` steps."""
        return every * PARTS * SLOT if self.measures else 0

    def pack(self, times: list[StepTimes], every: int) -> list[float]:
        """What a worker sends about its last steps."""
        slots = [(float(one.step), *part, one.joint) for one in times[-every:] for part in one.parts[:PARTS]]
        flat = [number for slot in slots for number in slot]
        return flat + [math.nan] * (self.numbers(every) - len(flat))

    def from_window(self, rows: NDArray[np.float64], room: int, fixed: float | None = None) -> Size | None:
        """Decide from everybody's steps of a window; None if there is nothing to tell.

        Args:
            rows: what `pack` gave, by worker.
            room: the largest batch that fits the workers' memory.
            fixed: the fixed cost of a step, in samples.
        """
        by_step: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        workers: dict[int, set[int]] = defaultdict(set)
        for rank, row in enumerate(rows):
            for slot in row.reshape(-1, SLOT).tolist():
                if math.isfinite(slot[0]):
                    by_step[int(slot[0])].append(tuple(slot[1:]))
                    workers[int(slot[0])].add(rank)
        asked = None
        for step in sorted(by_step):
            if len(workers[step]) < len(
                rows
            ):  # on a GPU a worker may be a step behind: what not all have told is passed over
                continue
            joint = by_step[step][0][3]
            parts = [part for part in by_step[step] if part[0] > 0]
            asked = self._see(
                Gradients(
                    step=step,
                    total=self.total,
                    most=min(self.length, room),
                    first=self._first,
                    fixed=fixed,
                    sizes=tuple(part[0] for part in parts),
                    squares=tuple(part[1] for part in parts),
                    joint=joint,
                    inner=tuple(part[2] for part in parts) if self.policy.needs == "inner" else (),
                ),
                asked,
            )
        return asked

    def from_sketches(self, sketches: Sketches, room: int, fixed: float | None = None) -> Size | None:
        """Decide from the sketches of all replicas' gradients."""
        told = [(b, row) for b, row in zip(sketches.samples, sketches.rows, strict=True) if b > 0]
        sizes = tuple(b for b, _ in told)
        whole = sum(sizes)
        joint = [total(b * row[place] for b, row in told) / whole for place in range(WIDTH)] if whole else []
        return self._see(
            Gradients(
                step=sketches.step,
                total=self.total,
                most=min(self.length, room),
                first=self._first,
                fixed=fixed,
                sizes=sizes,
                squares=tuple(_dot(row, row) for _, row in told),
                joint=_dot(joint, joint) if joint else math.nan,
                inner=tuple(_dot(row, joint) for _, row in told) if self.policy.needs == "inner" else (),
            ),
            None,
        )

    def _see(self, seen: Gradients, before: Size | None) -> Size:
        """One more observation; a change asked for by an earlier one of the same window stays unless this one asks again."""
        size, self.state = self.policy.update(seen, self.state)
        self.noise = size.noise if size.noise is not None else self.noise
        if size.warning and size.warning not in self._warned:
            self._warned.add(size.warning)
            self._log.write("note", text=f"the batch stays at {seen.total}: {size.warning}")
        if before is not None and size.total == seen.total:
            return before
        return size

    def plain(self) -> dict[str, Any]:
        """What a resume needs; the same on every worker."""
        return {"policy": self.policy.name, "state": to_plain(self.state), "total": self.total, "noise": self.noise}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; under another policy only the batch is taken over."""
        self.total, self.noise = state["total"], state["noise"]
        if state["policy"] == self.policy.name:
            self.state = from_plain(self.policy.init(), state["state"])


class Probe:
    """Sketches of local training: taken in one step of a round, gathered meanwhile, read when the round ends.

    Args:
        comm: the door to the other workers.
        sketch: takes them, within the gradient sum.
        replicas: the workers of each replica.
        last: look at the last step of a round, not at the first.
    """

    def __init__(self, comm: Comm, sketch: Sketch, replicas: tuple[tuple[int, ...], ...], *, last: bool) -> None:
        self._comm, self._sketch, self._replicas, self._last = comm, sketch, replicas, last
        self._under_way: PendingGather | Kept | None = None
        sketch.due = not last

    def after_step(self, step: int, *, ends: bool, begins: bool, next_ends: bool) -> Sketches | None:
        """An optimizer step was made; the sketches of all replicas, where a round has ended.

        Args:
            step: its number.
            ends: the round ends with it.
            begins: the next step is the first of a round.
            next_ends: the next step is the last of its round.
        """
        if self._sketch.values is not None:
            row = torch.tensor([float(step), float(self._sketch.samples)], dtype=torch.float64)
            self._under_way = self._comm.gather(torch.cat([row, self._sketch.values.double().cpu()]))
            self._sketch.values = None
        found = None
        if ends and self._under_way is not None:
            rows = self._under_way.wait().tolist()
            self._under_way = None
            found = Sketches(
                int(rows[0][0]),
                [sum(rows[rank][1] for rank in part) for part in self._replicas],
                [rows[part[0]][2:] for part in self._replicas],
            )
        self._sketch.due = next_ends if self._last else begins
        return found

    def state(self) -> dict[str, Any]:
        """What a resume needs; the same on every worker."""
        if self._under_way is not None:
            self._under_way = Kept(self._under_way.wait())
        rows = None if self._under_way is None else self._under_way.wait().tolist()
        return {"rows": rows, "due": self._sketch.due}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        rows = state["rows"]
        self._under_way = None if rows is None else Kept(torch.tensor(rows, dtype=torch.float64))
        self._sketch.due = state["due"]


class Kept:
    """A gather that had finished, as if it were under way."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def wait(self) -> torch.Tensor:
        """What was gathered."""
        return self._rows


def _dot(left: list[float], right: list[float]) -> float:
    return total(a * b for a, b in zip(left, right, strict=True))
