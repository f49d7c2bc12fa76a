"""What the events of a run say so far: who computes, who waits, what was decided. Bounded memory, for a run of any length."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.events import parts
from paceline.report.follow import MOST_WORKERS, Follower, modified, workers
from paceline.report.series import Series
from paceline.report.worker import Worker, shown

PHASES = ("data", "compute", "waiting", "exchange", "optimizer")
DECISIONS = 500  # kept: the newest
SILENT_S = 60.0  # without an event, after which a run without an end is called silent
_TEXT: dict[str, Callable[[dict[str, Any]], str]] = {
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
        windows: samples/s, efficiency, step time, samples/s the workers would make by themselves.
        waits: how long each worker waits for the slowest, per step.
        exchange: how long an exchange takes that nobody computes behind, per step.
        splits: samples of each worker.
        batches: the global batch, and the noise scale.
        rounds: transfer time, wait, bytes and drift of the exchanges of local training.
        zeta: dissimilarity of gradients.
        losses: mean loss of every epoch: epoch -> [sum, samples, step].
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
        self.data: dict[str, Any] = {}
        self.windows = Series(4)
        self.exchange, self.zeta, self.batches, self.rounds = Series(1), Series(1), Series(2), Series(4)
        self.waits: Series | None = None
        self.splits: Series | None = None
        self.num_rounds, self.round_bytes = 0, 0
        self.losses: dict[int, list[float]] = {}
        self.decisions: deque[Said] = deque(maxlen=DECISIONS)
        self.num_decisions = 0
        self.last_window: dict[str, Any] = {}
        self.split: list[int] = []
        self.stragglers: deque[dict[str, Any]] = deque(maxlen=100)
        self._newest: dict[str, tuple[int, int]] = {}
        self._noise: float | None = None
        self._said: set[str] = set()

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
        return kind in ("window", "plan") and (worker.starts, step) <= self._newest.get(kind, (-1, -1))

    @property
    def read_share(self) -> float:
        """How much of what there is has been read."""
        followers = [worker.follower for worker in self.workers.values() if worker.follower is not None]
        whole = sum(max(one.size, one.done) for one in followers)
        return sum(one.done for one in followers) / whole if whole else 1.0

    @property
    def _newest_start(self) -> dict[str, Any]:
        """Of the run as it began last: by how often a worker has begun, as clocks differ."""
        begun = [worker for worker in self.workers.values() if worker.start]
        return max(begun, key=lambda worker: (worker.starts, -worker.rank)).start if begun else {}

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
        """The newest step anybody tells of."""
        return max((worker.last_step for worker in self.workers.values()), default=-1)

    def status(self, now: float | None = None) -> str:
        """`empty`, `unreadable`, `running`, `silent` (no end, nothing for a minute), `failed` or `ended`."""
        there = [worker for rank, worker in self.workers.items() if worker.follower is not None and rank < self.size]
        if self.problem:
            return "unreadable"
        if not any(worker.start for worker in there):
            return "empty"
        latest = max(worker.starts for worker in there)
        ends = [worker.ok if worker.starts == latest else None for worker in there]
        if any(ok is False for ok in ends):
            return "failed"
        if all(ends):
            return "ended"
        return "running" if (time.time() if now is None else now) - self.written < SILENT_S else "silent"

    def offsets(self) -> dict[int, float]:
        """How far each worker's clock is ahead of the first one's: sums arrive, and rounds end, everywhere at once."""
        ranks = sorted(rank for rank, worker in self.workers.items() if worker.marks.at)
        if not ranks:
            return {}
        base, found = self.workers[ranks[0]].marks.at, {}
        for rank in ranks:
            mine = self.workers[rank].marks.at
            apart = [mine[number] - base[number] for number in mine.keys() & base.keys()]
            found[rank] = statistics.median(apart) if apart else 0.0
        return found

    def _take(self, worker: Worker, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "start":
            if not 1 <= int(event["size"]) <= MOST_WORKERS:
                raise ValueError(event["size"])
            worker.begin(event, self._local)
            return
        worker.last_t = max(worker.last_t, float(event.get("t") or 0.0))
        if kind == "steps":
            if worker.add(event):
                worker.settle(self._local)
        elif kind == "end":
            worker.ok, worker.dropped = bool(event["ok"]), worker.dropped + int(event.get("dropped") or 0)
        elif kind == "loss":
            entry = self.losses.setdefault(int(event["epoch"]), [0.0, 0.0, float(event["step"])])
            if event["loss"] is not None:
                entry[0] += float(event["loss"]) * event["samples"]
                entry[1] += event["samples"]
        elif kind == "round":
            worker.marks.add(int(event["step"]), float(event["t"]))
        if kind in ("note", "memory"):
            self._decided(event, worker.rank, worker.rank)
        elif kind in (
            "window",
            "plan",
            "batch",
            "lr",
            "sync",
            "shards",
            "round",
            "left-out",
            "state",
            "dissimilarity",
            "straggler",
        ):
            self._common(worker, event)
        if kind == "data":
            self.data = self.data or event

    def _common(self, worker: Worker, event: dict[str, Any]) -> None:
        """What all workers write alike is taken from the first that tells of it."""
        kind, place = event["type"], (worker.starts, int(event["step"]))
        key = f"{kind} {event['worker']}" if kind == "straggler" else kind
        if place <= self._newest.get(key, (-1, -1)):
            return
        self._newest[key] = place
        step = place[1]
        if kind == "window":
            self._window(event)
        elif kind == "plan":
            self.split = [int(share) for share in event["split"]]
            self.batches.add(step, (sum(self.split), self._noise))
            if event["changed"]:
                self._decided(event, -1, worker.rank)
        elif kind == "round":
            self.num_rounds += 1
            self.round_bytes += int(event.get("num_bytes") or 0)
            self.rounds.add(step, [event.get(name) for name in ("transfer_s", "waited_s", "num_bytes", "drift")])
        elif kind == "dissimilarity":
            self.zeta.add(step, [event["ratio"]])
        else:
            if kind == "batch":
                self._noise = event["noise"]
                self.batches.add(step, (event["total"], event["noise"]))
            if kind == "straggler":
                self.stragglers.append(event)
            self._decided(event, -1, worker.rank)

    def _window(self, event: dict[str, Any]) -> None:
        step, comm, seen = int(event["step"]), event["comm_s"], event["observation"]
        if self.waits is None or self.splits is None or self.waits.columns != len(comm):  # or other workers go on
            self.waits, self.splits = Series(len(comm)), Series(len(comm))
        rate, efficiency = event["samples_per_s"], event["efficiency"]
        able = rate / efficiency if efficiency else None
        self.windows.add(step, (rate, efficiency, max(event["step_s"]), able))
        known = [value for value in comm if value is not None]
        least = min(known, default=0.0)
        self.exchange.add(step, [least])
        self.waits.add(step, [None if value is None else value - least for value in comm])
        self.splits.add(step, seen["samples"])
        self.last_window = event

    @property
    def _local(self) -> bool:
        return str(self.config.get("sync", "allreduce")).partition(":")[0] != "allreduce"

    def _decided(self, event: dict[str, Any], rank: int, teller: int) -> None:
        text = shown(_TEXT[event["type"]](event))
        if event["type"] == "note":
            if text in self._said:
                return
            if len(self._said) < DECISIONS:
                self._said.add(text)
        self.num_decisions += 1
        self.decisions.append(Said(float(event["t"]), int(event.get("step", -1)), event["type"], rank, text, teller))


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
