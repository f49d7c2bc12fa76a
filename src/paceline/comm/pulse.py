"""A sign of life from every worker, so that a timeout can name who is missing.

Each worker's thread writes a counter and what the worker is doing to the shared store once a second. Nobody reads it
until something fails; then two looks, a little over a period apart, tell the dead from the late without comparing clocks.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

PERIOD_S = 1.0


@dataclass(frozen=True)
class Sign:
    """What another worker's pulse said last."""

    rank: int
    alive: bool
    step: int
    phase: str
    host: str
    pid: int

    def __str__(self) -> str:
        doing = f"at step {self.step}, {self.phase}" if self.step >= 0 else self.phase
        if self.alive:
            return f"worker {self.rank} ({self.host}, pid {self.pid}) is alive but has not arrived: {doing}"
        return f"worker {self.rank} ({self.host}, pid {self.pid}) gives no sign of life; last seen {doing}"


class Pulse:
    """Writes this worker's pulse and reads the others'.

    Args:
        store: a key-value store all workers share.
        rank: this worker.
        size: number of workers.
        host: name of this machine, for messages.
        pid: this process, for messages.
    """

    def __init__(self, store: Any, rank: int, size: int, host: str, pid: int) -> None:
        self._store, self._rank, self._size, self._host, self._pid = store, rank, size, host, pid
        self._doing: tuple[int, str] = (-1, "starting")
        self._count = 0
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="paceline-pulse", daemon=True)
        self._thread.start()

    def at(self, step: int, phase: str) -> None:
        """What the worker is doing now; sent with the next beat."""
        self._doing = (step, phase)

    def _beat(self) -> None:
        self._count += 1
        step, phase = self._doing
        self._store.set(f"pulse/{self._rank}", json.dumps([self._count, step, phase, self._host, self._pid]))

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                self._beat()
            except Exception:  # the store is gone: the run is over, and says so elsewhere
                return

    def stop(self) -> None:
        """No more beats."""
        self._stop.set()
        self._thread.join(timeout=2 * PERIOD_S)

    def look(self) -> list[Sign]:
        """Every other worker's sign, after watching for two and a half periods."""
        before = self._read()
        time.sleep(2.5 * PERIOD_S)
        after = self._read()
        signs = []
        for rank in range(self._size):
            if rank == self._rank:
                continue
            count, step, phase, host, pid = after.get(rank, (0, -1, "never seen", "unknown host", 0))
            signs.append(Sign(rank, count != before.get(rank, (0,))[0], step, phase, host, pid))
        return signs

    def _read(self) -> dict[int, tuple[Any, ...]]:
        found = {}
        for rank in range(self._size):
            try:
                if self._store.check([f"pulse/{rank}"]):
                    found[rank] = tuple(json.loads(self._store.get(f"pulse/{rank}")))
            except Exception:  # the store is gone with its host: nobody can be read
                return found
        return found
