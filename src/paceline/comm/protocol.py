"""The few verbs paceline needs from a network."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Block until it is done (on CUDA: make the current stream wait)."""
        ...


class PendingGather(Protocol):
    """A gather under way."""

    def wait(self) -> torch.Tensor:
        """The rows of all workers, by rank: a float64 tensor of shape (size, length)."""
        ...


class PendingSwap(Pending, Protocol):
    """A swap under way."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class Team(Protocol):
    """Some of the workers, among themselves. Calls are collective within the team."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its members, by their numbers in the whole world."""
        ...

    @property
    def place(self) -> int:
        """This worker's position among them."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def sum_(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` over the members, in place."""
        ...

    def swap(self, theirs: torch.Tensor, mine: torch.Tensor) -> Pending:
        """Start sending row i of `mine` to member i; row j of `theirs` will be member j's."""
        ...


@runtime_checkable
class Comm(Protocol):
    """What one worker may do with the others. Calls are collective: every worker makes them in the same order."""

    @property
    def rank(self) -> int:
        """This worker's number."""
        ...

    @property
    def size(self) -> int:
        """How many workers there are."""
        ...

    @property
    def backend(self) -> str:
        """What carries the bytes."""
        ...

    @property
    def staged(self) -> bool:
        """Whether gradients of GPUs go through host memory; the same answer on every worker."""
        ...

    def open_lanes(self, count: int) -> int:
        """Make sure that at least `count` exchanges can be under way side by side; collective. Returns how many can."""
        ...

    def sum_(self, tensor: torch.Tensor, lane: int = 0) -> Pending:
        """Start summing `tensor` over all workers, in place; lanes go round, and each keeps its order."""
        ...

    def swap(self, theirs: torch.Tensor, mine: torch.Tensor, lane: int = 0) -> PendingSwap:
        """Start sending row i of `mine` to worker i; row j of `theirs` will be worker j's."""
        ...

    def gather(self, row: torch.Tensor) -> PendingGather:
        """Start gathering one short float64 row from every worker, on a CPU group of its own."""
        ...

    def gather_text(self, text: str, what: str = "an exchange of texts") -> list[str]:
        """One string from every worker, by rank; `what` says in an error what it was for."""
        ...

    def teams(self, parts: Sequence[tuple[int, ...]], what: str, *, gradients: bool = False) -> Team | None:
        """Make teams of workers; collective. `what` says in errors what they are for. Returns the one this worker is in.

        With `gradients` a team uses what carries gradients between GPUs, else connections of its own.
        """
        ...

    def collect(self, data: torch.Tensor) -> list[torch.Tensor] | None:
        """A flat CPU tensor of bytes from every worker, on worker 0 alone."""
        ...

    def broadcast_(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite `tensors` with worker 0's."""
        ...

    def at(self, step: int, phase: str) -> None:
        """Note what this worker is doing, for the others' error messages; costs nothing."""
        ...

    def naming(self, what: str) -> AbstractContextManager[None]:
        """Inside, an error of the network becomes a `PeerError` that says what was tried and who was missing."""
        ...

    def group(self) -> Any:
        """The torch process group that DistributedDataParallel should use; None where there is none."""
        ...

    def close(self, *, graceful: bool) -> None:
        """Leave; if graceful, after the others have arrived here too."""
        ...
