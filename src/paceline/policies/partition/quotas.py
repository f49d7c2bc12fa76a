"""How many samples of each class does each part get, and in what order do parts take theirs?

Quotas are n_c w_p rounded so that every class is divided exactly, every cell is within 1 of its share, and what rounding took from a
part in one class it is first in line to get back in the next. Turns follow Tijdeman's solution of the chairman assignment problem
(Discrete Mathematics 32, 1980): after any number of turns each part has had its share of them, to within less than one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError

Ints = NDArray[np.int64]


def shares(speeds: Sequence[float]) -> list[float]:
    """Speeds as shares that sum to 1.

    Raises:
        ConfigError: no part, or a speed that is not a number of at least 0, or all are 0.
    """
    if not len(speeds):
        raise ConfigError("speeds must name at least one part, got none")
    for part, speed in enumerate(speeds):
        if not isinstance(speed, Real) or not math.isfinite(speed) or speed < 0:
            raise ConfigError(
                f"speeds must be numbers of at least 0 (0 for a part that has left); part {part} has {speed!r}"
            )
    speeds = [float(speed) for speed in speeds]
    total = math.fsum(speeds)
    if total <= 0:
        raise ConfigError(f"at least one part must have a speed above 0; got {list(speeds)}")
    return [speed / total for speed in speeds]


def quotas(counts: Sequence[int], weights: Sequence[float]) -> Ints:
    """Samples of class c for part p.

    >>> quotas([10, 3], [0.25, 0.75]).tolist()
    [[3, 7], [0, 3]]
    """
    carry = [0.0] * len(weights)
    rows = []
    for count in counts:
        ideal = [count * weight for weight in weights]
        row = [math.floor(value + 1e-9) for value in ideal]
        order = sorted(range(len(weights)), key=lambda p: (-(ideal[p] + carry[p] - row[p]), p))
        able = [p for p in order if weights[p] > 0]
        for p in able[: count - sum(row)]:
            row[p] += 1
        carry = [carry[p] + ideal[p] - row[p] for p in range(len(weights))]
        rows.append(row)
    return np.array(rows, np.int64).reshape(len(counts), len(weights))


def turns(quota: Sequence[int]) -> Ints:
    """The part that takes each turn, in an order in which everybody has its share at any time, to within less than one.

    >>> turns([1, 3]).tolist()
    [1, 0, 1, 1]
    """
    total = int(sum(quota))
    active = [part for part, count in enumerate(quota) if count]
    if len(active) == 1:
        return np.full(total, active[0], np.int64)
    out = np.empty(total, np.int64)
    slack = 1.0 / (2 * len(active) - 2) if len(active) > 1 else 0.5
    rates = {part: quota[part] / total for part in active}

    def seat(part: int, number: int) -> tuple[int, float, int, int]:
        """When a part's seat may be taken first, and the latest."""
        release = math.ceil((number + slack) / rates[part] - 1e-12)
        deadline = (number + 1 - slack) / rates[part]
        return release, deadline, part, number

    waiting = [seat(part, 0) for part in active]
    heapq.heapify(waiting)
    ready: list[tuple[float, int, int]] = []
    for turn in range(1, total + 1):
        while waiting and waiting[0][0] <= turn:
            _, deadline, part, number = heapq.heappop(waiting)
            heapq.heappush(ready, (deadline, part, number))
        if not ready:  # rounding of rates: the one that would be released first
            _, deadline, part, number = heapq.heappop(waiting)
            heapq.heappush(ready, (deadline, part, number))
        _, part, number = heapq.heappop(ready)
        out[turn - 1] = part
        if number + 1 < quota[part]:
            heapq.heappush(waiting, seat(part, number + 1))
    return out
