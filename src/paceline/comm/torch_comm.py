"""The real network: torch.distributed, over nccl or gloo."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.pulse import Pulse
from paceline.comm.team import TorchTeam, Work, lane
from paceline.errors import ConfigError, PeerError, PeerLost, PeerTimeout
from paceline.process import NODE

EXCHANGING = "exchanging"
_generation = itertools.count()  # a process may join and leave several times; each world has keys of its own
SUM = "the gradient sum"
TWO_HOP_BYTES = 2**20
TWO_HOP_WORKERS = 64
_BYE_S = 5.0
_SETTLE_S = 0.1


class _TwoHops:
    """A sum in two hops: every worker sums one slice of everybody's tensor, then hands its slice to everybody.

    gloo's all-reduce sends the same number of bytes, but in 2 (n - 1) hops round a ring, one after the other. For small
    tensors the hops are what takes time. Each value is summed in the order of ranks, wherever it lies in the tensor.
    """

    def __init__(self, comm: TorchComm, tensor: torch.Tensor) -> None:
        self._comm, self._tensor = comm, tensor
        size = comm.size
        length = -(-tensor.numel() // size)
        self._mine = torch.zeros(size * length, dtype=tensor.dtype)
        self._mine[: tensor.numel()] = tensor.reshape(-1)
        self._theirs = torch.empty_like(self._mine)
        self._work = dist.all_to_all_single(self._theirs, self._mine, async_op=True)

    def wait(self) -> None:
        with self._comm.naming(SUM):
            self._work.wait()
            slices = self._theirs.view(self._comm.size, -1)
            total = slices[0]
            for part in slices[1:]:
                total += part
            dist.all_to_all_single(self._mine, total.repeat(self._comm.size))
        self._tensor.copy_(self._mine[: self._tensor.numel()].view_as(self._tensor))


class _Gathered:
    def __init__(self, work: Work | None, rows: list[torch.Tensor]) -> None:
        self._work, self._rows = work, rows

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return torch.stack(self._rows)


class TorchComm:
    """One worker's door to the others.

    Args:
        device: where this worker computes.
        backend: "nccl", "gloo", or None to choose from what all workers have.
        timeout_s: longest wait for another worker.

    Joins the process group that exists, or makes one: from torchrun's environment, or for this process alone.
    """

    def __init__(self, device: torch.device, backend: str | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._prefix = f"paceline/{next(_generation)}"
        self._owns = not dist.is_initialized()
        self._gpus: list[str | None] = [None]
        if self._owns:
            self._join(device, backend)
        else:
            self._store = dist.PrefixStore(self._prefix, _default_store())
            self._hello(dist.get_rank(), dist.get_world_size(), device)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._lanes: list[Any] = []
        self._teams: list[TorchTeam] = []
        self._num_teams = 0
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._pulse = Pulse(self._store, self._rank, self._size, os.environ.get(NODE) or self._host, self._pid)
        self._closed = False
        with self.naming("opening the control group"):
            self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.backend = str(dist.get_backend())

    def _join(self, device: torch.device, backend: str | None) -> None:
        timeout = timedelta(seconds=self._timeout_s)
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            self._store = dist.HashStore()
            dist.init_process_group(backend or _solo_backend(device), store=self._store, rank=0, world_size=1)
            return
        world = int(os.environ["WORLD_SIZE"])
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        except Exception as error:
            raise PeerTimeout(
                f"worker {os.environ['RANK']} of {world} did not reach the rendezvous at "
                f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within {self._timeout_s:g} s: {error}"
            ) from error
        store.set_timeout(timeout)
        self._store = dist.PrefixStore(self._prefix, store)
        self._hello(rank, size, device)
        if backend is None:
            each_its_own = None not in self._gpus and len(set(self._gpus)) == size
            backend = "cpu:gloo,cuda:nccl" if each_its_own else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("torch", self._store), rank=rank, world_size=size, timeout=timeout
        )

    def _hello(self, rank: int, size: int, device: torch.device) -> None:
        """Learn everybody's GPU; who does not show up is named."""
        host = socket.gethostname()
        gpu = f"{host}/{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
        self._store.set(f"hello/{rank}", json.dumps({"host": host, "gpu": gpu}))
        try:
            self._store.wait([f"hello/{other}" for other in range(size)], timedelta(seconds=self._timeout_s))
        except Exception as error:
            missing = tuple(other for other in range(size) if not self._store.check([f"hello/{other}"]))
            raise PeerTimeout(
                f"{size} workers should start, but {_names(missing)} did not within {self._timeout_s:g} s. Look at "
                f"their logs, or raise timeout_s",
                missing,
            ) from error
        self._gpus = [json.loads(self._store.get(f"hello/{other}"))["gpu"] for other in range(size)]

    @property
    def staged(self) -> bool:
        """Whether gradients of GPUs go through host memory."""
        return self._size > 1 and self.backend == "gloo" and any(gpu is not None for gpu in self._gpus)

    def open_lanes(self, count: int) -> int:
        """Make groups with sockets and threads of their own until there are `count` lanes."""
        with self.naming("opening lanes"):
            while len(self._lanes) < count and self._size > 1:
                store = dist.PrefixStore(f"lane/{len(self._lanes)}", self._store)
                self._lanes.append(lane(store, self._rank, self._size, self._timeout_s))
        return max(1, len(self._lanes))

    def teams(self, parts: Sequence[tuple[int, ...]], what: str, *, gradients: bool = False) -> TorchTeam | None:
        """Make teams of workers."""
        self._num_teams += 1
        mine = next((part for part in parts if self._rank in part), None)
        group: Any = None
        with self.naming(f"connecting for {what}"):
            if gradients and "nccl" in self.backend:
                for part in parts:
                    made = dist.new_group(list(part), timeout=timedelta(seconds=self._timeout_s))
                    group = made if part == mine else group
            elif mine is not None and len(mine) > 1:
                store = dist.PrefixStore(f"team/{self._num_teams}/{mine[0]}", self._store)
                group = lane(store, mine.index(self._rank), len(mine), self._timeout_s)
        if mine is None:
            return None
        team = TorchTeam(self, mine, group, what)
        self._teams.append(team)
        return team

    def collect(self, data: torch.Tensor) -> list[torch.Tensor] | None:
        """A tensor of bytes from every worker, on worker 0 alone."""
        sizes = [int(size) for size in self.gather(torch.tensor([float(data.numel())], dtype=torch.float64)).wait()]
        with self.naming("collecting the workers' states"):
            if self._rank:
                dist.send(data, 0, group=self._control)
                return None
            received = [data]
            for rank in range(1, self._size):
                received.append(torch.empty(sizes[rank], dtype=data.dtype))
                dist.recv(received[-1], rank, group=self._control)
            return received

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._size

    @property
    def host(self) -> str:
        """This machine's name."""
        return self._host

    def sum_(self, tensor: torch.Tensor, lane: int = 0) -> Work | _TwoHops:
        """Start summing `tensor` over all workers, in place."""
        small = tensor.nbytes <= TWO_HOP_BYTES and not any(self._gpus)  # all workers must choose alike
        with self.naming(SUM):
            if self._lanes:
                return Work(self, self._lanes[lane % len(self._lanes)].allreduce([tensor]), SUM)
            if small and 2 < self._size <= TWO_HOP_WORKERS:
                return _TwoHops(self, tensor)
            return Work(self, dist.all_reduce(tensor, group=self._group_for(tensor), async_op=True), SUM)

    def _group_for(self, tensor: torch.Tensor) -> Any:
        """The default group, or where that knows nothing of the CPU's memory (nccl by itself) the one for small things."""
        return self._control if tensor.device.type == "cpu" and "gloo" not in self.backend else None

    def swap(self, theirs: torch.Tensor, mine: torch.Tensor, lane: int = 0) -> Work:
        """Start sending row i of `mine` to worker i."""
        with self.naming(SUM):
            group = self._lanes[lane % len(self._lanes)]
            return Work(self, group.alltoall_base(theirs, mine, [], [], dist.AllToAllOptions()), SUM)

    def gather(self, row: torch.Tensor) -> _Gathered:
        """Start gathering one short float64 row from every worker."""
        assert row.dtype == torch.float64
        assert row.device.type == "cpu"
        rows = [torch.empty_like(row) for _ in range(self._size)]
        if self._size == 1:
            rows[0].copy_(row)
            return _Gathered(None, rows)
        with self.naming("the exchange of step times"):
            work = dist.all_gather(rows, row, group=self._control, async_op=True)
        return _Gathered(Work(self, work, "the exchange of step times"), rows)

    def gather_text(self, text: str, what: str = "an exchange of texts") -> list[str]:
        """One string from every worker, by rank."""
        if self._size == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        with self.naming(what):
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self._size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._control)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = data
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._size)]
            dist.all_gather(parts, padded, group=self._control)
        return [bytes(p[: int(n)].tolist()).decode() for p, n in zip(parts, sizes, strict=True)]

    def broadcast_(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite `tensors` with worker 0's."""
        with self.naming("a broadcast"):
            for work in [
                dist.broadcast(tensor, src=0, group=self._group_for(tensor), async_op=True) for tensor in tensors
            ]:
                work.wait()

    def at(self, step: int, phase: str) -> None:
        """Note what this worker is doing."""
        self._pulse.at(step, phase)

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Turn an error of the network into one that names who was missing."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _of_network(error):
                raise
            raise self._named(what, error) from error

    def _named(self, what: str, error: RuntimeError) -> PeerError:
        self.at(self._pulse._doing[0], EXCHANGING)
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        signs = [sign for sign in self._pulse.look() if not (sign.alive and sign.phase == EXCHANGING)]
        dead = [sign for sign in signs if not sign.alive]
        named = dead or signs
        who = "; ".join(str(sign) for sign in named) or "nobody: all others wait as this one does"
        missing = tuple(sign.rank for sign in named)
        if late:
            return PeerTimeout(
                f"{what} did not finish within {self._timeout_s:g} s on worker {self._rank}. Missing: {who}. "
                f"If that worker was only slow, raise timeout_s",
                missing,
            )
        return PeerLost(
            f"{what} was cut off on worker {self._rank}. Missing: {who}. Look at that worker's log", missing
        )

    def group(self) -> Any:
        """The default group."""
        return dist.group.WORLD

    def close(self, *, graceful: bool) -> None:
        """Leave. If graceful, wait a little for the others, so that nobody closes a socket in use."""
        if self._closed:
            return
        self._closed = True
        self._pulse.stop()
        if graceful and self._size > 1:
            try:
                self._store.set(f"bye/{self._rank}", "1")
                self._store.wait([f"bye/{other}" for other in range(self._size)], timedelta(seconds=_BYE_S))
            except Exception:  # somebody failed and will say so; leaving is all that is left to do
                pass
        if self._owns and dist.is_initialized():
            # A gloo thread drops the tensors of its last operation after that has ended, and needs the interpreter lock for it.
            # Destroying the group joins the thread while holding the lock: a deadlock, unless the drop has happened by then.
            time.sleep(_SETTLE_S)
            if graceful:  # else a sum may be under way, and a lane's end would wait for it
                self._lanes.clear()
                for team in self._teams:
                    team.close()
            dist.destroy_process_group()


def _of_network(error: RuntimeError) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "connection", "timed out", "timeout", "nccl", "socket", "peer"))


def _names(ranks: tuple[int, ...]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))


def _solo_backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _default_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def pick_device(name: str | None) -> torch.device:
    """The named device, or this worker's GPU where there is one, or the CPU."""
    if name is not None:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ConfigError(f"device must be a torch device such as 'cuda:0' or 'cpu'; got {name!r}") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device {name!r} was asked for, but this worker sees no CUDA device")
        if device.type != "cuda" or device.index is not None:
            return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
