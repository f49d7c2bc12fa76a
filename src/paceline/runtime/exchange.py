"""The exchange of changes between replicas, in a thread of its own, so that training goes on meanwhile.

With A the anchor (the same on every replica), y_m what replica m sent, w_m its weight:

    delta_m = A - y_m                    what it changed since the anchor
    A'      = outer(A, sum_m w_m delta_m)
    x_m    <- x_m + (A' - y_m)           when it is taken in: the steps made meanwhile stay

Replicas that are single workers are summed within the node first, then over nodes (`runtime/hops.py`). It goes in chunks, so that
buffers stay small.

An exchange that is waited for reads the model as it goes: only one under way holds a copy of what was sent, of the fragment that
goes.

What compression rounds off stays where it was: the workers of the node that rounded take A' as less by that much, divided by the
node's weight, and send it with the next change. So nothing is lost, the weighted mean over replicas is untouched by any merge, and
no memory is needed for it. (A node with less than a twentieth of the samples leaves out what the second hop rounds off.)
"""

from __future__ import annotations

import math
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm import Comm, Team
from paceline.errors import DisagreementError
from paceline.policies.sync.outliers import drift, weigh
from paceline.policies.sync.protocol import Round, Terms
from paceline.runtime.codec import CODECS, Codec
from paceline.runtime.flat import Flat
from paceline.runtime.hops import NodeSum
from paceline.runtime.topology import Topology

CHUNK = 2**20  # values
LEAST_WEIGHT = (
    0.05  # a node that counts less does not carry what the second rounding took: it would be blown up by 1 / weight
)
_ROW = ("samples", "length", "step_s", "transfer_s", "drift", "tick", "start", "end", "lr")


@dataclass
class Outcome:
    """An exchange that is over.

    Args:
        start: first value that was exchanged.
        end: one past the last.
        restart: this worker's replica was left out: it must start again from the anchor.
        round: what it told.
        weights: of the replicas.
        reason: why somebody was left out.
        transfer_s: how long it took.
        num_bytes: what this worker sent to other nodes.
        exact: nothing was rounded.
    """

    start: int
    end: int
    restart: bool
    round: Round
    weights: tuple[float, ...]
    reason: str
    transfer_s: float
    num_bytes: int
    exact: bool = True


@dataclass
class _Job:
    start: int
    end: int
    samples: float
    step_s: float
    lr: float
    codec: Codec
    plain: bool
    held: bool
    ready: Any = None


class Exchange:
    """Anchor, what was sent, and the thread that exchanges them. One exchange at a time.

    Args:
        comm: the door to the other workers.
        topology: who is on which node.
        terms: how.
        flat: the model. Its buffers are averaged as they are, in fp32, with every exchange.

    Attributes:
        anchor: A, and once an exchange is over A'.
        sent: of what is exchanged while training goes on y_m, and once that is over A' - y_m: parameters, then buffers.
    """

    def __init__(self, comm: Comm, topology: Topology, terms: Terms, flat: Flat) -> None:
        self._comm, self._terms, self._flat = comm, terms, flat
        length, tail = self._length, self._tail = flat.length, flat.tail
        self.anchor = flat.empty(length + tail)
        self.sent = flat.empty(0)
        self.momentum = torch.zeros(length) if terms.outer_momentum else None
        self.replicas = topology.members if terms.level == "node" else tuple((rank,) for rank in range(comm.size))
        self.replica = next(number for number, part in enumerate(self.replicas) if comm.rank in part)
        self._mates, self._node_weight = topology.members[topology.node_of(comm.rank)], 0.0
        self._nodes = NodeSum(comm, topology)
        everybody = comm.teams([tuple(range(comm.size))], "comparing replicas")
        assert everybody is not None
        self._everybody: Team = everybody
        chunk = min(CHUNK, max(1, length + tail))
        self._work, self._now = torch.zeros(chunk), flat.empty(0)
        self._chunk = chunk
        self._left = torch.zeros(chunk) if terms.compress != "none" else None
        self._last = (math.nan, 0.0)  # how long the exchange before took, and its drift
        self._tick = 0
        self._job: _Job | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def under_way(self) -> bool:
        """Whether something was sent and not taken in."""
        return self._job is not None

    def start(
        self,
        start: int,
        end: int,
        *,
        samples: float,
        step_s: float,
        lr: float = 0.0,
        agree: bool = False,
        plain: bool = False,
        held: bool = False,
        ready: Any = None,
    ) -> None:
        """Exchange [start, end) of the parameters, and all buffers.

        Args:
            start: first value.
            end: one past the last.
            samples: how many this worker has processed since the last exchange.
            step_s: how long its steps take.
            lr: its learning rate; must be everybody's.
            agree: compress nothing.
            plain: average, whatever the outer optimizer.
            held: `hold` has copied what goes, and training goes on; else the model stays as it is until this is over, and what
                compression leaves is added to it on the way.
            ready: a CUDA event after which the copy is there, or None.
        """
        assert self._job is None, "one exchange at a time"
        codec = CODECS["none" if agree else self._terms.compress]
        self._job = _Job(start, end, samples, step_s, lr, codec, plain, held, ready)
        self._outcome, self._error = None, None
        self._done.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="paceline-exchange", daemon=True)
            self._thread.start()
        self._jobs.put(self._job)

    def hold(self, start: int, end: int) -> Any:
        """Copy [start, end) of the parameters and all buffers; returns the event after which the copy is there, if any."""
        count = end - start
        if self.sent.numel() < count + self._tail:
            self.sent = self._flat.empty(count + self._tail)
        self._flat.read(self.sent, start, end, origin=start)
        return self._flat.read(self.sent, self._length, self._length + self._tail, origin=self._length - count)

    def arrive(self) -> Outcome:
        """Wait until the exchange is over; it can still be taken in later."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def take(self) -> Outcome:
        """Wait for the exchange and take it in."""
        outcome = self.arrive()
        self._job = self._outcome = None
        return outcome

    def close(self, *, graceful: bool) -> None:
        """End the thread; if graceful, when it is done."""
        self._jobs.put(None)
        if graceful and self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._outcome = self._play(job)
            except BaseException as error:  # raised where it is waited for
                self._error = error
            self._done.set()

    def _play(self, job: _Job) -> Outcome:
        if job.ready is not None:
            job.ready.synchronize()
        rows = self._compare(job)
        begun = time.perf_counter()  # here, not before: a fast node's wait for a slow one is no transfer
        samples, lengths = self._by_replica(rows[:, 0]), self._by_replica(rows[:, 1], longest=True)
        weights, left_out, reason = weigh(samples, lengths, self._terms.outlier)
        weight = weights[self.replica]
        own = self._of_worker(weight, rows[:, 0].tolist())
        self._node_weight = math.fsum(weights[rank] for rank in self._mates) if self._alone else weight
        mean_square, num_bytes = 0.0, 0
        for low in range(job.start, job.end, CHUNK):
            high = min(low + CHUNK, job.end)
            square, sent = self._exchange(low, high, weight, job)
            mean_square, num_bytes = mean_square + square, num_bytes + sent
        for low in range(self._length, self._length + self._tail, CHUNK):
            high = min(low + CHUNK, self._length + self._tail)
            num_bytes += self._exchange(low, high, own, job, tail=True)[1]
        told = Round(
            step_s=float(rows[:, 2].max()),
            transfer_s=float(rows[:, 3].max()) if bool(torch.isfinite(rows[:, 3]).all()) else 0.0,
            drift=float(rows[0, 4]),
            left_out=left_out,
        )
        self._flat.fence()  # what was added to the model on the way
        took = time.perf_counter() - begun
        usual = job.codec is CODECS[self._terms.compress] or not math.isfinite(self._last[0])
        self._last = took if usual else self._last[0], drift(weights, lengths, math.sqrt(mean_square))
        return Outcome(
            job.start, job.end, self.replica in left_out, told, weights, reason, took, num_bytes, job.codec.exact
        )

    @property
    def _alone(self) -> bool:
        return self._terms.level == "worker"

    def _of_worker(self, weight: float, samples: list[float]) -> float:
        """This worker's part of its replica's weight."""
        members = self.replicas[self.replica]
        total = math.fsum(samples[rank] for rank in members)
        return weight * (samples[self._comm.rank] / total if total else 1.0 / len(members))

    def _sent(self, low: int, high: int, job: _Job) -> torch.Tensor:
        """y."""
        if job.held:
            at = low - job.start if low < self._length else job.end - job.start + low - self._length
            return self.sent[at : at + high - low]
        if not self._now.numel():
            self._now = self._flat.empty(self._chunk)
        event = self._flat.read(self._now, low, high, origin=low)
        if event is not None:
            event.synchronize()
        return self._now[: high - low]

    def _change(self, low: int, high: int, sent: torch.Tensor) -> torch.Tensor:
        """A - y; in buffers nothing where both are the same: a mask of infinities has not changed."""
        anchor, out = self.anchor[low:high], self._work[: high - low]
        torch.sub(anchor, sent, out=out)
        return out.masked_fill_(anchor == sent, 0.0) if low >= self._length else out

    def _compare(self, job: _Job) -> torch.Tensor:
        """Everybody's row: what it counts, how far it went, and what must be the same everywhere."""
        square, finite = 0.0, True
        for low in range(job.start, job.end, CHUNK):
            high = min(low + CHUNK, job.end)
            change = self._change(low, high, self._sent(low, high, job))
            square += float(torch.dot(change, change))
        for low in range(self._length, self._length + self._tail, CHUNK):
            high = min(low + CHUNK, self._length + self._tail)
            finite &= bool(torch.isfinite(self._change(low, high, self._sent(low, high, job))).all())
        self._tick += 1
        length = math.sqrt(square) if math.isfinite(square) and finite else math.nan
        row = [job.samples, length, job.step_s, *self._last, self._tick, job.start, job.end, job.lr]
        mine = torch.tensor(row, dtype=torch.float64).expand(self._everybody.size, len(_ROW)).contiguous()
        theirs = torch.empty_like(mine)
        self._everybody.swap(theirs, mine).wait()
        for name, column in zip(_ROW[5:], theirs[:, 5:].T.tolist(), strict=True):
            if len(set(column)) > 1:
                raise DisagreementError(
                    f"all workers must make the same exchanges, but {name} is {column}: every worker must make the same optimizer "
                    f"steps with the same learning rate. Look for a loop that some leave early, or a scheduler fed with local numbers"
                )
        return theirs

    def _by_replica(self, column: torch.Tensor, *, longest: bool = False) -> list[float]:
        values = column.tolist()
        if not longest:
            return [math.fsum(values[rank] for rank in part) for part in self.replicas]
        return [
            values[part[0]] if all(math.isfinite(values[rank]) for rank in part) else math.nan for part in self.replicas
        ]

    def _exchange(self, low: int, high: int, weight: float, job: _Job, *, tail: bool = False) -> tuple[float, int]:
        """One chunk: from A to A', from y to A' - y; returns the squared length of the mean change, and bytes sent to other nodes.

        Buffers (`tail`) differ between the workers of a node even if those are one replica, so each counts for itself.
        """
        anchor, sent = self.anchor[low:high], self._sent(low, high, job)
        codec = CODECS["none"] if tail else job.codec
        total = self._change(low, high, sent).mul_(weight) if weight else self._work[: high - low].zero_()
        if tail or self._alone:
            self._nodes.node.sum_(total).wait()
        left = self._left[: high - low].zero_() if self._left is not None and not codec.exact else None
        num_bytes = self._nodes.sum_(total, left, codec, carries=self._node_weight >= LEAST_WEIGHT)
        square = float(torch.dot(total, total))
        plain = tail or job.plain
        if not plain and self.momentum is not None:
            momentum = self.momentum[low:high]
            momentum.mul_(self._terms.outer_momentum).add_(total)
            total.add_(momentum, alpha=self._terms.outer_momentum)
        anchor.sub_(total, alpha=1.0 if plain else self._terms.outer_lr)
        if tail or (codec.exact and not job.held):
            return square, num_bytes  # the replica takes A' as it is
        torch.sub(anchor, sent, out=sent)
        if left is not None and self._node_weight:
            sent.sub_(left, alpha=1.0 / self._node_weight)
        if not job.held:
            self._flat.add(sent, low, high, origin=low)
        return square, num_bytes

    def state(self) -> dict[str, Any]:
        """What a resume needs; waits for what is under way."""
        outcome = self.arrive() if self._job is not None else None
        return {
            "sent": self.sent if outcome is not None else None,
            "last": list(self._last),
            "tick": self._tick,
            "outcome": None
            if outcome is None
            else {
                "span": [outcome.start, outcome.end],
                "restart": outcome.restart,
                "round": [outcome.round.step_s, outcome.round.transfer_s, outcome.round.drift],
                "left_out": list(outcome.round.left_out),
                "weights": list(outcome.weights),
                "reason": outcome.reason,
                "took": [outcome.transfer_s, outcome.num_bytes],
                "exact": outcome.exact,
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with an exchange that has arrived if one was under way."""
        self._last, self._tick = (float(state["last"][0]), float(state["last"][1])), int(state["tick"])
        self._job = self._outcome = self._error = None
        kept = state["outcome"]
        if kept is None:
            return
        self.sent = self._flat.empty(state["sent"].numel()).copy_(state["sent"])
        (start, end), (step_s, transfer_s, drifted), (took, num_bytes) = kept["span"], kept["round"], kept["took"]
        told = Round(step_s, transfer_s, drifted, tuple(kept["left_out"]))
        self._outcome = Outcome(
            start, end, kept["restart"], told, tuple(kept["weights"]), kept["reason"], took, num_bytes, kept["exact"]
        )
        self._job = _Job(start, end, 0.0, 0.0, 0.0, CODECS["none"], plain=False, held=True)
        self._done.set()
