"""A network inside one process, for tests: every worker is a thread, and faults are data.

world = LoopbackWorld(4, faults=[Fault(rank=2, verb="gather", call=3, kind="lose")])
comms = [world.comm(rank) for rank in range(4)]      # one per thread
...
assert world.fired == world.faults
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from paceline.errors import PeerLost, PeerTimeout


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong: at the `call`-th use (from 0) of `verb` by worker `rank`.

    Args:
        rank: the worker it happens to.
        verb: "sum_", "gather", "gather_text" or "broadcast_".
        call: which use of the verb.
        kind: "lose" ends the worker's connection for good, "delay" holds it up for `seconds`.
        seconds: how long a delay lasts.
    """

    rank: int
    verb: str
    call: int
    kind: Literal["lose", "delay"]
    seconds: float = 0.0


class LoopbackWorld:
    """The shared side of the double.

    Args:
        size: number of workers.
        faults: what goes wrong, and when.
        timeout_s: longest wait for another worker.
    """

    def __init__(self, size: int, faults: Sequence[Fault] = (), timeout_s: float = 5.0) -> None:
        self.size, self.faults, self.timeout_s = size, list(faults), timeout_s
        self.fired: list[Fault] = []
        self._arrived: dict[tuple[str, int], dict[int, Any]] = {}
        self._lost: set[int] = set()
        self._changed = threading.Condition()

    def comm(self, rank: int) -> LoopbackComm:
        """Worker `rank`'s side."""
        return LoopbackComm(self, rank)

    def put(self, rank: int, verb: str, call: int, value: Any) -> None:
        """Worker `rank` takes part in the `call`-th `verb`, unless a fault stops it."""
        for fault in self.faults:
            if (fault.rank, fault.verb, fault.call) == (rank, verb, call):
                self.fired.append(fault)
                if fault.kind == "delay":
                    time.sleep(fault.seconds)
                else:
                    with self._changed:
                        self._lost.add(rank)
                        self._changed.notify_all()
                    raise PeerLost(f"worker {rank} lost its connection, as scripted", (rank,))
        with self._changed:
            self._arrived.setdefault((verb, call), {})[rank] = value
            self._changed.notify_all()

    def take(self, rank: int, verb: str, call: int, members: Sequence[int] | None = None) -> list[Any]:
        """Everybody's value, by rank; raises if somebody is lost or late."""
        members = range(self.size) if members is None else members
        everyone = set(members)
        with self._changed:
            arrived = self._arrived.setdefault((verb, call), {})
            self._changed.wait_for(
                lambda: len(arrived) == len(everyone) or bool((self._lost & everyone) - arrived.keys()), self.timeout_s
            )
            absent = everyone - arrived.keys()
        if absent:
            missing = tuple(sorted(absent & self._lost or absent))
            kind = PeerLost if absent & self._lost else PeerTimeout
            raise kind(f"{verb} number {call} did not finish on worker {rank}. Missing: workers {missing}", missing)
        return [arrived[other] for other in members]


class _Later:
    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self) -> Any:
        return self._finish()

    def done(self) -> bool:
        return False  # it takes part when it is waited for


class LoopbackTeam:
    """Some of the workers of the double."""

    def __init__(self, comm: LoopbackComm, ranks: tuple[int, ...], name: str) -> None:
        self._comm, self.ranks, self._name = comm, ranks, name
        self.place, self.size = ranks.index(comm.rank), len(ranks)

    def _later(self, verb: str, value: torch.Tensor, finish: Callable[[list[torch.Tensor]], None]) -> _Later:
        call = self._comm._enter(f"{self._name}.{verb}", value.clone())
        world = self._comm._world
        return _Later(lambda: finish(world.take(self._comm.rank, f"{self._name}.{verb}", call, self.ranks)))

    def sum_(self, tensor: torch.Tensor) -> _Later:
        """Start summing in place; the sum is taken in the order of members."""
        return self._later("sum_", tensor, lambda parts: _sum_into(tensor, parts))

    def swap(self, theirs: torch.Tensor, mine: torch.Tensor) -> _Later:
        """Start sending row i of `mine` to member i."""

        def finish(parts: list[torch.Tensor]) -> None:
            for row, sent in zip(theirs, parts, strict=True):
                row.copy_(sent[self.place])

        return self._later("swap", mine, finish)


def _sum_into(tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    tensor.copy_(total)


class LoopbackComm:
    """One worker's side of the double; satisfies `Comm`."""

    backend = "loopback"
    host = "loopback"
    staged = False

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self._world, self._rank = world, rank
        self._calls: dict[str, int] = {}
        self.doing: tuple[int, str] = (-1, "starting")
        self.closed = False

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._world.size

    def _enter(self, verb: str, value: Any) -> int:
        call = self._calls.get(verb, 0)
        self._calls[verb] = call + 1
        self._world.put(self._rank, verb, call, value)
        return call

    def open_lanes(self, count: int) -> int:
        """Every call finds its partners by its number: lanes are not needed."""
        return count

    def swap(self, theirs: torch.Tensor, mine: torch.Tensor, lane: int = 0) -> _Later:
        """Start sending row i of `mine` to worker i."""
        call = self._enter(f"swap{lane}", mine.clone())

        def finish() -> None:
            for row, sent in zip(theirs, self._world.take(self._rank, f"swap{lane}", call), strict=True):
                row.copy_(sent[self._rank])

        return _Later(finish)

    def sum_(self, tensor: torch.Tensor, lane: int = 0) -> _Later:
        """Start summing in place; the sum is taken in rank order."""
        call = self._enter("sum_", tensor.clone())
        return _Later(lambda: _sum_into(tensor, self._world.take(self._rank, "sum_", call)))

    def teams(self, parts: Sequence[tuple[int, ...]], what: str, *, gradients: bool = False) -> LoopbackTeam | None:
        """Make teams of workers."""
        call = self._enter("teams", None)
        return next((LoopbackTeam(self, part, f"team{call}.{part[0]}") for part in parts if self._rank in part), None)

    def collect(self, data: torch.Tensor) -> list[torch.Tensor] | None:
        """Everybody's bytes, on worker 0."""
        call = self._enter("collect", data.clone())
        received: list[torch.Tensor] = self._world.take(self._rank, "collect", call)
        return None if self._rank else received

    def gather(self, row: torch.Tensor) -> _Later:
        """Start gathering rows."""
        call = self._enter("gather", row.clone())
        return _Later(lambda: torch.stack(self._world.take(self._rank, "gather", call)))

    def gather_text(self, text: str, what: str = "an exchange of texts") -> list[str]:
        """Strings of all workers."""
        call = self._enter("gather_text", text)
        return self._world.take(self._rank, "gather_text", call)

    def broadcast_(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite with worker 0's."""
        call = self._enter("broadcast_", [tensor.clone() for tensor in tensors])
        for mine, theirs in zip(tensors, self._world.take(self._rank, "broadcast_", call)[0], strict=True):
            mine.copy_(theirs)

    def at(self, step: int, phase: str) -> None:
        """Remember what the worker is doing."""
        self.doing = (step, phase)

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Errors of this double name the missing already."""
        yield

    def group(self) -> None:
        """There is no torch group."""
        return None

    def close(self, *, graceful: bool) -> None:
        """Leave."""
        self.closed = True
