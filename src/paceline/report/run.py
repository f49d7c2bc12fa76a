"""What the events of a run say so far: who computes, who waits, what was decided. Bounded memory, for a run of any length."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.events import parts
from paceline.report.follow import MOST_WORKERS, Follower, modified, workers
from paceline.report.series import LAST, Series
from paceline.report.window import Window
from paceline.report.worker import Worker, shown

PHASES = ("data", "compute", "waiting", "exchange", "optimizer")
DECISIONS = 500  # kept: the newest
_KINDS = 1000  # of events that are told of once
_COMMON = ("window", "plan", "batch", "lr", "sync", "shards", "round", "state", "dissimilarity", "straggler")
SILENT_S = 60.0  # without an event, after which a run without an end is called silent
TEXT: dict[str, Callable[[dict[str, Any]], str]] = {
    "plan": lambda e: f"split {' '.join(map(str, e['split']))}: {e['reason']}",
    "batch": lambda e: f"batch {e['before']} to {e['total']}: {e['reason']}",
    "lr": lambda e: f"learning rate times {e['factor']:.3g} ({e['rule']}, batch {e['batch']})",
    "sync": lambda e: f"{e['policy']}: {e['reason']}",
    "shards": lambda e: f"{e['moved']} samples change hands: {e['reason']}",
    "left-out": lambda e: str(e["reason"]),
    "memory": lambda e: f"out of memory at {e['samples']} samples: {e['micro_batches']} micro-batches from now on",
    "state": lambda e: f"{e['action']} {e['path']}" + (f": {e['note']}" if e.get("note") else ""),
    "straggler": lambda e: str(e["text"]),
    "note": lambda e: str(e["text"]),
}


class Said(NamedTuple):
    """A decision, or something else worth a line: `worker` is whom it concerns, -1 for all; `teller` whose clock `t` is of."""

    t: float
    step: int
    kind: str
    worker: int
    text: str
    teller: int


class Run:
    """A run folder, read anew with every `update`.

    Args:
        folder: the run folder.
        newest: bytes at the end of what all workers wrote to read in full; of what is before, decisions and losses alone are taken in.
        name: what to call it, if not after its folder.

    Attributes:
        workers: by rank; also those without a file, as far as the others tell of them.
        windows: per step: samples, seconds, samples the workers would make by themselves in that time.
        waits: how long each worker waits for the slowest, per step; then how long the step takes.
        exchange: how long an exchange takes that nobody computes behind, per step.
        splits: samples of each worker.
        batches: the global batch, and the noise scale.
        rounds: transfer time, wait and drift of the exchanges of local training.
        sent: bytes that a worker sends to other nodes in such an exchange.
        zeta: dissimilarity of gradients.
        losses: mean loss of every epoch: epoch -> [sum, samples, step, attempt].
        window: what the newest window says.
        begins: the first step of the newest attempt that is told of.
        decisions: newest last.
        num_decisions: also those that are not kept any more.
        stragglers: the events that told of them, newest last.
        problem: why reading had to stop.
    """

    def __init__(self, folder: Path, newest: int | None = None, name: str = "") -> None:
        self.folder, self._newest_bytes = folder, newest
        self.name = shown(name or folder.resolve().name)
        self.problem = ""
        self.workers: dict[int, Worker] = {}
        self.windows, self.batches, self.rounds = Series(3), Series(2), Series(3)
        self.exchange, self.zeta, self.sent = Series(1), Series(1), Series(1)
        self.waits: Series | None = None
        self.splits: Series | None = None
        self.num_rounds, self.round_bytes = 0, 0
        self.losses: dict[int, list[float]] = {}
        self.decisions: deque[Said] = deque(maxlen=DECISIONS)
        self.num_decisions = 0
        self.window: Window | None = None
        self.split: list[int] = []
        self.stragglers: deque[dict[str, Any]] = deque(maxlen=100)
        self.begins = 0
        self._attempt = 0  # the newest that was told of, by number
        self._numbers: dict[float, int] = {}  # of attempts, in the order in which they came
        self._attempts: dict[int, int] = {}  # of each series
        self._newest: dict[str, tuple[int, int]] = {}
        self._noise: float | None = None
        self._said: set[Any] = set()

    def update(self, budget_s: float = math.inf) -> bool:
        """Take in what is new; whether anything was.

        Args:
            budget_s: stop after so many seconds, and go on from there the next time.
        """
        changed, until = False, time.monotonic() + budget_s
        files = workers(self.folder)
        newest = None if self._newest_bytes is None else self._newest_bytes // max(1, len(files))
        for rank, path in files.items():
            worker = self.workers.setdefault(rank, Worker(rank))
            if worker.follower is None:
                worker.follower = Follower(path, newest=newest)
                worker.follower.skip = partial(self._known, worker)
        for worker in list(self.workers.values()):
            if worker.follower is None:
                continue
            for event in worker.follower.new(until):
                changed = True
                try:
                    self._take(worker, event)
                except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
                    worker.follower.damaged += 1
            worker.settle(self._local)
            if worker.follower.paused:
                return True
        return changed

    def _known(self, worker: Worker, kind: str, step: int) -> bool:
        """Whether another worker has told the same already."""
        return kind in ("window", "plan") and (self._number(worker), step) <= self._newest.get(kind, (-1, -1))

    def _number(self, worker: Worker) -> int:
        """Which attempt a worker is in. The order is that of the first worker's file; by value alone, clocks set back would mix it up."""
        known = self._numbers.get(worker.attempt)
        if known is None:
            first = worker.rank == min(self.workers)
            if not first and self._numbers and worker.attempt < max(self._numbers):
                return 0
            known = self._numbers[worker.attempt] = len(self._numbers) + 1
        return known

    def _current(self, worker: Worker) -> bool:
        """Whether a worker takes part since the run began last."""
        newest = self._newest_start
        if "attempt" in newest or "attempt" in worker.start:
            return bool(worker.start) and worker.start.get("attempt") == newest.get("attempt")
        return bool(worker.start) and worker.start.get("size") == newest.get("size")  # older files do not tell

    @property
    def read_share(self) -> float:
        """How much of what there is has been read."""
        followers = [worker.follower for worker in self.workers.values() if worker.follower is not None]
        whole = sum(max(one.size, one.done) for one in followers)
        return sum(one.done for one in followers) / whole if whole else 1.0

    @property
    def _newest_start(self) -> dict[str, Any]:
        """Of the run as it began last: its first worker is always there."""
        begun = [worker for _, worker in sorted(self.workers.items()) if worker.start]
        return begun[0].start if begun else {}

    @property
    def size(self) -> int:
        """Workers there should be."""
        start = self._newest_start
        return int(start["size"]) if start else max((rank + 1 for rank in self.workers), default=0)

    @property
    def missing(self) -> list[int]:
        """Workers without a file."""
        there = {rank for rank, worker in self.workers.items() if worker.follower is not None}
        return [rank for rank in range(self.size) if rank not in there]

    @property
    def damaged(self) -> int:
        """Lines that could not be read."""
        return sum(worker.follower.damaged for worker in self.workers.values() if worker.follower is not None)

    @property
    def dropped(self) -> int:
        """Events that were not written."""
        return sum(worker.dropped for worker in self.workers.values())

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        found = self._newest_start.get("config", {})
        return found if isinstance(found, dict) else {}

    def policy(self, name: str) -> str:
        """The name of the `balance`, `sync` or `batch` policy."""
        told = self._newest_start.get("policies")
        given = told.get(name) if isinstance(told, dict) else self.config.get(name)
        return str(given).partition(":")[0]

    @property
    def seconds(self) -> float:
        """How long the run has run."""
        return max((worker.seconds for worker in self.workers.values()), default=0.0)

    @property
    def origin(self) -> float:
        """When the run began, by the clock of the first worker that has one."""
        begun = [rank for rank, worker in sorted(self.workers.items()) if worker.start]
        offsets = self.offsets()
        return min((self.workers[rank].first_t - offsets.get(rank, 0.0) for rank in begun), default=0.0)

    @property
    def written(self) -> float:
        """When anybody wrote last, by this machine's clock."""
        return max((modified(file) for path in workers(self.folder).values() for _, file in parts(path)), default=0.0)

    @property
    def last_step(self) -> int:
        """The newest step anybody tells of, since the run began last."""
        current = [worker for worker in self.workers.values() if self._current(worker)]
        told = [worker for worker in current if not worker.again] or current  # nothing is done again yet
        return max((worker.last_step for worker in told), default=-1)

    def status(self, now: float | None = None) -> str:
        """`empty`, `unreadable`, `running`, `silent` (no end, and nothing for longer than usual), `failed` or `ended`."""
        there = [worker for rank, worker in self.workers.items() if worker.follower is not None and rank < self.size]
        if self.problem:
            return "unreadable"
        if not any(worker.start for worker in there):
            return "empty"
        ends = [worker.ok if self._current(worker) else None for worker in there]
        if any(ok is False for ok in ends):
            return "failed"
        if all(ends):
            return "ended"
        patience = max(SILENT_S, 3 * max(worker.pause_s for worker in there))
        return "running" if (time.time() if now is None else now) - self.written < patience else "silent"

    def offsets(self) -> dict[int, float]:
        """How far each worker's clock is ahead of the first one's: sums arrive, and rounds end, everywhere at once.

        A worker that shares no such moment with the first is left out: nobody knows.
        """
        ranks = sorted(rank for rank, worker in self.workers.items() if worker.marks.newest)
        if not ranks:
            return {}
        base = self.workers[ranks[0]].marks
        found = {rank: self.workers[rank].marks.apart(base) for rank in ranks}
        return {rank: apart for rank, apart in found.items() if apart is not None}

    @property
    def clocks_unknown(self) -> list[int]:
        """Workers whose clocks could not be compared."""
        known = self.offsets()
        return [rank for rank, worker in sorted(self.workers.items()) if worker.last_step >= 0 and rank not in known]

    def _take(self, worker: Worker, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "start":
            if not 1 <= int(event["size"]) <= MOST_WORKERS:
                raise ValueError(event["size"])
            worker.begin(event, self._local)
            return
        worker.heard(event)
        if kind == "steps":
            if worker.add(event):
                worker.settle(self._local)
        elif kind == "end":
            worker.ok, worker.dropped = bool(event["ok"]), worker.dropped + int(event.get("dropped") or 0)
        elif kind == "loss":
            self._loss(worker, event)
        elif kind in ("note", "memory", "left-out"):
            once = (self._number(worker), event.get("step")) if kind == "left-out" else ()
            self._decided(event, -1 if kind == "left-out" else worker.rank, worker.rank, once)
        elif kind in _COMMON:
            if kind == "round":
                self._round(worker, event)
            self._common(worker, event)

    def _loss(self, worker: Worker, event: dict[str, Any]) -> None:
        epoch, step, samples, number = (
            int(event["epoch"]),
            int(event["step"]),
            float(event["samples"]),
            self._number(worker),
        )
        if event["loss"] is None:
            return
        loss = float(event["loss"])
        if not (math.isfinite(loss) and math.isfinite(samples) and samples >= 0):
            raise ValueError(loss)
        entry = self.losses.get(epoch)
        if entry is None or entry[3] < number:  # the epoch was done again, and with it all that came after
            lost = [one for one, kept in self.losses.items() if one >= epoch and kept[3] < number]
            for one in lost:
                del self.losses[one]
            entry = self.losses[epoch] = [0.0, 0.0, float(step), float(number)]
        if entry[3] == number:
            entry[0] += loss * samples
            entry[1] += samples

    def _round(self, worker: Worker, event: dict[str, Any]) -> None:
        """What a worker says of an exchange for itself."""
        step, sent, t = int(event["step"]), int(event.get("num_bytes") or 0), float(event["t"])
        if not (0 <= step <= LAST and 0 <= sent < 2**50):
            raise ValueError(sent)
        if not self._advance(worker):
            return
        worker.marks.add(step, t)
        self.round_bytes += sent
        self._point(self.sent, step, [sent])

    def _advance(self, worker: Worker) -> bool:
        """Whether a worker tells of the newest attempt; a newer one begins to count anew."""
        number = self._number(worker)
        if number > self._attempt:
            self._attempt, self.num_rounds, self.round_bytes = number, 0, 0
        return number == self._attempt

    def _common(self, worker: Worker, event: dict[str, Any]) -> None:
        """What all workers write alike is taken from the first that tells of it."""
        kind, place = event["type"], (self._number(worker), int(event["step"]))
        apart = {"straggler": "worker", "round": "span"}.get(kind)
        key = f"{kind} {event.get(apart)}" if apart else kind
        if not 0 <= place[1] <= LAST:
            raise ValueError(place[1])
        if place <= self._newest.get(key, (-1, -1)) or not self._advance(worker):
            return
        if kind == "plan" and place[0] > 1 and not place[1]:
            return  # made before the checkpoint was read: nobody follows it
        self._told(worker, kind, place[1], event)
        if len(self._newest) < _KINDS or key in self._newest:
            self._newest[key] = place

    def _told(self, worker: Worker, kind: str, step: int, event: dict[str, Any]) -> None:
        if kind == "window":
            self._window(worker, step, event)
        elif kind == "plan":
            split = [int(share) for share in event["split"]]
            self._point(self.batches, step, (sum(split), self._noise))
            self.split = split
            if event["changed"]:
                self._decided(event, -1, worker.rank)
        elif kind == "round":
            self._point(self.rounds, step, [event.get(name) for name in ("transfer_s", "waited_s", "drift")])
            self.num_rounds += 1
        elif kind == "dissimilarity":
            self._point(self.zeta, step, [event["ratio"]])
        else:
            if kind == "batch":
                self._point(self.batches, step, (event["total"], event["noise"]))
                self._noise = event["noise"]
            self._decided(event, -1, worker.rank)
            if kind == "straggler":
                self.stragglers.append(event)

    def _point(self, series: Series, step: int, values: Sequence[float | None], first: int | None = None) -> None:
        """One more point; the first one of another attempt replaces what was there from that step on."""
        if self._attempts.get(id(series), self._attempt) != self._attempt:
            series.cut(step if first is None else first)
        series.add(step, values)
        self._attempts[id(series)] = self._attempt

    def _window(self, worker: Worker, step: int, event: dict[str, Any]) -> None:
        seen = Window.of(event)
        if seen is None:
            return
        size = len(seen.waiting_s)
        if worker.start and size != int(worker.start["size"]):
            raise ValueError(f"{size} workers")
        first = max(0, step + 1 - seen.num_steps)
        if self.waits is None or self.splits is None or self.splits.columns != size:  # or other workers go on
            self.waits, self.splits = Series(size + 1), Series(size)
        if self._attempts.get(id(self.windows)) != self._attempt:
            self.begins = first
        able = seen.limit * seen.step_s if seen.limit is not None else None
        self._point(self.windows, step, (seen.samples_per_s * seen.step_s, seen.step_s, able), first)
        self._point(self.exchange, step, [seen.exchange_s], first)
        self._point(self.waits, step, [*seen.waiting_s, seen.step_s], first)
        self._point(self.splits, step, seen.samples, first)
        self.window = seen
        if len(self.split) != size or all(seen.samples):
            self.split = [round(samples) for samples in seen.samples]

    @property
    def _local(self) -> bool:
        return bool(self._newest_start) and self.policy("sync") not in ("allreduce", "None")

    def _decided(self, event: dict[str, Any], rank: int, teller: int, once: tuple[Any, ...] = ()) -> None:
        text = said(event)
        if event["type"] in ("note", "left-out"):
            if (text, *once) in self._said:
                return
            if len(self._said) < DECISIONS:
                self._said.add((text, *once))
        self.num_decisions += 1
        self.decisions.append(Said(float(event["t"]), int(event.get("step", -1)), event["type"], rank, text, teller))


def said(event: dict[str, Any]) -> str:
    """A decision, or something else worth a line, in words."""
    return shown(TEXT[event["type"]](event))


def runs_in(folders: Sequence[Path]) -> list[Run]:
    """A run for each folder, called by as much of its path as tells it from the others.

    >>> [run.name for run in runs_in([Path("/runs/a/seed-1"), Path("/runs/b/seed-1")])]
    ['a/seed-1', 'b/seed-1']
    """
    paths = [folder.resolve() for folder in folders]
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(set(paths)):
        length += 1
    return [Run(folder, name="/".join(path.parts[-length:])) for folder, path in zip(folders, paths, strict=True)]
