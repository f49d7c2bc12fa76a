"""What a step costs before its first sample: from the time of every worker at several batches, and that of the exchange.

With T(B) the time of the slowest worker when B samples are divided as they would be, and x the exchange nobody computes behind,

    a = (T(2B) - T(B)) / B,      fixed cost = (T(B) + x - a B) / a      samples.

One size of a batch does not tell a line's slope from its height: until every worker has had two, the answer is "unknown".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.policies.balance.fit import Fit, Lines
from paceline.policies.balance.level import Floats
from paceline.types import Observation, to_plain

APART = 1.1  # a worker's largest batch over its smallest, from which on its line is believed
_FIT = Fit()


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """What is known of the workers' times.

    Args:
        lines: t = fixed + slope * b of each.
        least: the smallest batch each has had.
        most: the largest.
        exchange_s: the exchange of a step, as far as nobody computes behind it.
    """

    lines: Lines
    least: Floats
    most: Floats
    exchange_s: float = 0.0

    @classmethod
    def unknown(cls, num_workers: int) -> Cost:
        """Nothing seen."""
        return cls(Lines.unknown(num_workers), np.zeros(num_workers), np.zeros(num_workers))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cost) and to_plain(self) == to_plain(other)

    def add(self, seen: Observation, exchange_s: float | None) -> Cost:
        """With one more window; its exchange is None where not everybody told."""
        samples = np.array(seen.samples)
        lines = _FIT.update(self.lines, samples, np.array(seen.busy_s), np.array(seen.noise_s))
        least = np.where((samples > 0) & ((self.least == 0) | (samples < self.least)), samples, self.least)
        first = not self.lines.weight.any()
        if exchange_s is None:
            exchange_s = self.exchange_s
        blended = exchange_s if first else _FIT.memory * self.exchange_s + (1 - _FIT.memory) * exchange_s
        return Cost(lines, least, np.maximum(self.most, samples), blended)

    def fixed(self, total: int, divide: Callable[[int], tuple[int, ...]], further_s: float = 0.0) -> float | None:
        """The fixed cost of a step, in samples; None while unknown.

        Args:
            total: the global batch.
            divide: how a batch is divided between the workers.
            further_s: what a step waits for beside the exchange that was measured.
        """
        now, twice = np.array(divide(total)), np.array(divide(2 * total))
        moving = (now > 0) & (now != twice)  # who is held at a bound has its share whatever the batch
        if (moving & ((self.least == 0) | (self.most < APART * self.least))).any() or not moving.any():
            return None
        once, double = self._slowest(now), self._slowest(twice)
        slope = (double - once) / total
        return max(0.0, (once + self.exchange_s + further_s) / slope - total) if slope > 0 else None

    def _slowest(self, split: NDArray[np.int64]) -> float:
        times = np.where(split > 0, self.lines.fixed_s + self.lines.slope_s * split, 0.0)
        return float(times.max())
