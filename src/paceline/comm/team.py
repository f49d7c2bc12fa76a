"""Groups of some workers over torch.distributed, and handles of what they have under way."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from paceline.comm.torch_comm import TorchComm


class Work:
    """A torch work handle whose errors name the missing."""

    def __init__(self, comm: TorchComm, work: Any, what: str) -> None:
        self._comm, self._work, self._what = comm, work, what

    def wait(self) -> None:
        """Block until it is done."""
        with self._comm.naming(self._what):
            self._work.wait()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._work.is_completed())


class Done:
    """Nothing under way."""

    def wait(self) -> None:
        """Nothing to wait for."""


class TorchTeam:
    """Some of the workers, over a group of their own.

    Args:
        comm: the whole world.
        ranks: the members.
        group: their torch process group; None for a team of one.
        what: what it is for, in errors.
    """

    def __init__(self, comm: TorchComm, ranks: tuple[int, ...], group: Any, what: str) -> None:
        self._comm, self.ranks, self._group, self._what = comm, ranks, group, what
        self.place, self.size = ranks.index(comm.rank), len(ranks)

    def sum_(self, tensor: torch.Tensor) -> Work | Done:
        """Start summing `tensor` over the members."""
        if self._group is None:
            return Done()
        with self._comm.naming(self._what):
            return Work(self._comm, self._group.allreduce([tensor]), self._what)

    def swap(self, theirs: torch.Tensor, mine: torch.Tensor) -> Work | Done:
        """Start sending row i of `mine` to member i."""
        if self._group is None:
            theirs.copy_(mine)
            return Done()
        with self._comm.naming(self._what):
            work = self._group.alltoall_base(theirs, mine, [], [], dist.AllToAllOptions())
            return Work(self._comm, work, self._what)

    def close(self) -> None:
        """Let go of the connections."""
        self._group = None


def lane(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """A gloo group with one thread: more would spin while they wait for the GPU. `new_group` gives two and no choice."""
    options = dist.ProcessGroupGloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo
    options._devices = [make.create_device(interface=name) for name in names] or [make.create_default_device()]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, size, options)
