"""The training losses a loop reports: kept for an epoch, told to the event log and to whoever decides by them."""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.comm import Comm
from paceline.events import EventLog


class Losses:
    """What this worker reported in the epoch under way.

    Args:
        comm: the door to the other workers.
        log: where means go.
    """

    def __init__(self, comm: Comm, log: EventLog) -> None:
        self._comm, self._log = comm, log
        self._told: list[tuple[Any, int]] = []

    def add(self, loss: torch.Tensor | float, samples: int) -> None:
        """The mean loss of a batch of so many samples; it may stay on the device."""
        self._told.append((loss.detach() if isinstance(loss, torch.Tensor) else float(loss), samples))

    def close(self, epoch: int, step: int) -> tuple[float, int]:
        """The epoch is over: the sum over samples and their number; both begin anew."""
        told, self._told = self._told, []
        total, count = math.fsum(float(value) * samples for value, samples in told), sum(n for _, n in told)
        if count:
            self._log.write("loss", epoch=epoch, step=step, loss=total / count, samples=count)
        return total, count

    def close_over_all(self, epoch: int, step: int) -> float | None:
        """The same as the mean over all workers' samples; None if nobody reported. Collective."""
        rows = self._comm.gather(torch.tensor(self.close(epoch, step), dtype=torch.float64)).wait().tolist()
        count = math.fsum(row[1] for row in rows)
        return math.fsum(row[0] for row in rows) / count if count else None

    def state(self) -> list[tuple[float, int]]:
        """What a resume in mid-epoch needs."""
        return [(float(value), samples) for value, samples in self._told]

    def load(self, state: list[tuple[float, int]]) -> None:
        """Go on from a saved state."""
        self._told = [(value, samples) for value, samples in state]
