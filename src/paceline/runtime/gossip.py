"""Gossip, done: every worker exchanges parameters with its neighbours, chunk by chunk, and mixes. No copy of the model is kept.

Each edge of the graph is a team of two; edges are taken in groups in which nobody has two, in the same order everywhere, so nobody
waits in a circle. A worker whose parameters are not finite is passed over, and takes its neighbours' mean; if they are no better, the
run ends. Buffers are mixed too; what is the same on both sides stays, a mask of infinities for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.comm import Comm, Team
from paceline.errors import CheckpointError, NonFiniteError
from paceline.events import EventLog
from paceline.policies.sync import Moment, SyncState
from paceline.policies.sync.gossip import Gossip, mixing, neighbours, rounds
from paceline.runtime.flat import Flat
from paceline.runtime.hook import WeightedSum
from paceline.types import from_plain, to_plain

CHUNK = 2**20  # values


class GossipRounds:
    """One worker's part in gossip; what `Rounds` is for methods that agree.

    Args:
        policy: decides when, and on which graph.
        comm: the door to the other workers.
        module: the plain model.
        optimizer: its optimizer.
        total: the hook that sums gradients; its scope is set here.
        log: where mixings are noted.
    """

    def __init__(
        self,
        policy: Gossip,
        comm: Comm,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        total: WeightedSum,
        log: EventLog,
    ) -> None:
        self._policy, self._comm, self._optimizer, self._total, self._log = policy, comm, optimizer, total, log
        self._flat = Flat(module)
        edges = policy.links(comm.size)
        self._degrees = [len(neighbours(edges, worker)) for worker in range(comm.size)]
        self._teams: list[Team] = []
        for group in rounds(edges):
            team = comm.teams(group, "mixing with a neighbour")
            if team is not None:
                self._teams.append(team)
        scope, self._state = policy.init()
        total.scope = scope
        self._step, self._used, self._depth, self._settled = 0, 0.0, 0, True
        chunk = min(CHUNK, max(1, self._everything))
        self._own, self._mixed = self._flat.empty(chunk), self._flat.empty(chunk)
        self._mine, self._theirs = torch.zeros(2 * chunk), torch.zeros(2 * chunk)

    @property
    def local(self) -> bool:
        """Replicas differ."""
        return True

    @property
    def _everything(self) -> int:
        return self._flat.length + self._flat.tail

    def after_step(
        self,
        epoch: int,
        *,
        ends_epoch: bool,
        loss: Callable[[], float | None],
        next_ends_epoch: Callable[[], bool] = lambda: False,
    ) -> None:
        """An optimizer step was made (or skipped, on all counts as one)."""
        self._step += 1
        self._settled = False
        self._used += self._total.processed
        self._total.processed = 0
        if ends_epoch:
            loss()
        action, self._state = self._policy.update(Moment(self._step, epoch, ends_epoch), self._state)
        if action.send:
            self._mix()

    def _chunks(self, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Pieces of the parameters, then of the buffers: none holds both."""
        chunk, length = self._mixed.numel(), self._flat.length
        for begin, stop in ((0, length), (length, self._everything if end is None else end)):
            for low in range(begin, stop, chunk):
                yield low, min(low + chunk, stop)

    def _read(self, out: torch.Tensor, low: int, high: int) -> None:
        event = self._flat.read(out, low, high, origin=low)
        if event is not None:
            event.synchronize()

    def finite(self) -> bool:
        """Whether this worker's parameters are finite."""
        for low, high in self._chunks(self._flat.length):
            self._read(self._mixed, low, high)
            if not bool(torch.isfinite(self._mixed[: high - low]).all()):
                return False
        return True

    def _mix(self) -> None:
        healthy = self.finite()
        head = torch.tensor([self._used, float(healthy)], dtype=torch.float64)
        others = []
        for team in self._teams:
            mine, theirs = head.expand(2, 2).contiguous(), torch.empty(2, 2, dtype=torch.float64)
            team.swap(theirs, mine).wait()
            other = theirs[1 - team.place].tolist()
            rank = team.ranks[1 - team.place]
            others.append((other[0], self._degrees[rank], bool(other[1]), rank))
        counted = [(samples, degree) if fine else (0.0, degree) for samples, degree, fine, _ in others]
        own, weights = mixing(self._used, self._degrees[self._comm.rank], counted)
        if not healthy:  # start again from what neighbours hold
            fine = [float(one[2]) for one in others]
            if not any(fine):
                near = [rank for _, _, _, rank in others]
                raise NonFiniteError(
                    f"parameters must be finite, but those of worker {self._comm.rank} are not at step {self._step}, nor those of its "
                    f"neighbours {near}. Go back to the last checkpoint; look at the learning rate"
                )
            own, weights = 0.0, [value / sum(fine) for value in fine]
        left_out = [rank for _, _, fine, rank in others if not fine]
        num_bytes = 0
        for low, high in self._chunks():
            count = high - low
            self._read(self._own, low, high)
            values = self._own[:count]
            mine, theirs = self._mine[: 2 * count].view(2, count), self._theirs[: 2 * count].view(2, count)
            tail = low >= self._flat.length
            if not healthy and not tail:
                values.zero_()
            mixed = self._mixed[:count].copy_(values)
            for team, weight in zip(self._teams, weights, strict=True):
                mine[1 - team.place] = values
                team.swap(theirs, mine).wait()
                num_bytes += 4 * count
                if weight:
                    change = theirs[1 - team.place] - values
                    if tail:
                        change.masked_fill_(theirs[1 - team.place] == values, 0.0)
                    mixed.add_(change, alpha=weight)
            self._flat.write(self._mixed, low, high, origin=low)
        if not healthy:
            for state in self._optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.zero_()
        self._flat.fence()
        self._log.write(
            "round",
            step=self._step,
            span=[0, self._flat.length],
            every=self._state.every,
            delay=0,
            num_bytes=num_bytes,
            weights=[own, *weights],
        )
        if left_out or not healthy:
            who = [*left_out, *([] if healthy else [self._comm.rank])]
            self._log.write("left-out", step=self._step, replicas=who, reason=f"workers {who} are not finite")

    def _mean_into(self, out: torch.Tensor) -> None:
        """The mean over all workers, by samples used; collective."""
        counts = torch.tensor([max(self._used, 1e-9) if self.finite() else 0.0], dtype=torch.float64)
        used = self._comm.gather(counts).wait().view(-1).tolist()
        weight = float(counts) / sum(used) if sum(used) else math.nan
        for low, high in self._chunks():
            self._read(self._mixed, low, high)
            values = self._mixed[: high - low]
            part = values * weight if weight else torch.zeros(high - low)
            self._comm.sum_(part).wait()
            same = torch.isinf(values) & ~torch.isfinite(part)  # a mask of infinities is not averaged
            out[low:high] = torch.where(same, values, part) if low >= self._flat.length else part

    def settle(self) -> None:
        """Make all replicas the mean, now; collective."""
        mean = self._flat.empty()
        self._mean_into(mean)
        self._flat.write(mean, 0, self._everything)
        self._flat.fence()
        self._settled = True

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is the mean over all workers; the same on every one. Collective, as nobody keeps that mean."""
        if self._depth:
            yield
            return
        own, mean = self._flat.empty(), self._flat.empty()
        self._read(own, 0, self._everything)
        self._mean_into(mean)
        self._flat.write(mean, 0, self._everything)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._flat.write(own, 0, self._everything)
            self._flat.fence()

    def probe(self, last: bool, resize: Any) -> None:
        """Neighbours alone tell too little of the noise over all workers."""
        raise AssertionError("refused before")

    def state(self) -> dict[str, Any]:
        """What a resume needs and all workers share; collective."""
        mean = self._flat.empty()
        self._mean_into(mean)
        return {
            "policy": self._policy.name,
            "nodes": [[rank] for rank in range(self._comm.size)],
            "state": to_plain(self._state),
            "scope": self._total.scope,
            "step": self._step,
            "settled": self._settled,
            "anchor": mean,
            "momentum": None,
            "probe": None,
        }

    def own_state(self) -> dict[str, Any]:
        """What differs between workers."""
        values = self._flat.empty()
        self._read(values, 0, self._everything)
        return {"values": values, "optimizer": self._optimizer.state_dict(), "used": self._used}

    def load(self, state: dict[str, Any], own: dict[str, Any] | None) -> str | None:
        """Go on from a saved state; a sentence if replicas could not be taken over one by one."""
        if state["policy"] != self._policy.name and not state["settled"]:
            raise CheckpointError(
                f"a run resumes with its own sync policy: the checkpoint has {state['policy']!r}, this run "
                f"{self._policy.name!r}. Call pace.settle() before saving to change it"
            )
        self._step = state["step"]
        if own is None or "used" not in own:
            if state["anchor"] is not None:
                self._flat.write(state["anchor"], 0, self._everything)
            return "saved by other workers or under another sync policy: replicas start from the mean"
        self._state = from_plain(SyncState(), state["state"])
        self._flat.write(own["values"], 0, self._everything)
        self._optimizer.load_state_dict(own["optimizer"])
        self._used = own["used"]
        self._flat.fence()
        return None

    def close(self, *, graceful: bool) -> None:
        """Nothing is under way between two steps."""
