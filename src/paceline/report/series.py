"""A series over steps in bounded memory: equal buckets of steps, which double in width when there are too many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 1024
LAST = 10**9  # no step of ours is beyond
_WAITING = 1024  # points taken in at once

Floats = NDArray[np.float64]


class Series:
    """Means of some columns over steps.

    Args:
        columns: how many.
        most: buckets, even.

    Attributes:
        columns: how many.
        width: steps in a bucket.
    """

    def __init__(self, columns: int, most: int = MOST) -> None:
        self.width, self.columns = 1, columns
        self._most = most
        self._sums, self._counts = np.zeros((most, columns)), np.zeros((most, columns))
        self._steps: list[int] = []
        self._rows: list[list[float]] = []

    def add(self, step: int, values: Sequence[float | None]) -> None:
        """One more point; None is a value that is not there.

        Raises:
            ValueError: a step or a number of values that cannot be.
        """
        if not 0 <= step <= LAST or len(values) != self.columns:
            raise ValueError(f"step {step} with {len(values)} values, {self.columns} columns")
        self._rows.append([math.nan if value is None else float(value) for value in values])
        self._steps.append(int(step))
        if len(self._steps) >= _WAITING:
            self._take()

    def extend(self, steps: Floats, rows: Floats) -> None:
        """Many points at once.

        Args:
            steps: of each.
            rows: its values; NaN for one that is not there.

        Raises:
            ValueError: a step that cannot be.
        """
        if not ((steps >= 0) & (steps <= LAST)).all():
            raise ValueError(f"steps {steps.min():g} to {steps.max():g}, must be 0 to {LAST}")
        while int(steps.max()) // self.width >= self._most:
            self._widen()
        places, there = (steps // self.width).astype(np.int64), np.isfinite(rows)
        np.add.at(self._sums, places, np.where(there, rows, 0.0))
        np.add.at(self._counts, places, there)

    def cut(self, step: int) -> None:
        """Forget everything from a step on, to a bucket's precision: the run has gone back there."""
        self._take()
        self._sums[max(0, step) // self.width :] = 0.0
        self._counts[max(0, step) // self.width :] = 0.0

    def _take(self) -> None:
        if self._steps:
            steps, rows = np.array(self._steps, dtype=np.float64), np.array(self._rows, dtype=np.float64)
            self._steps, self._rows = [], []
            self.extend(steps, rows)

    def _widen(self) -> None:
        half = self._most // 2
        for table in (self._sums, self._counts):
            table[:half] = table[0::2] + table[1::2]
            table[half:] = 0.0
        self.width *= 2

    def _places(self) -> NDArray[np.int64]:
        self._take()
        return np.flatnonzero(self._counts.any(axis=1))

    def __len__(self) -> int:
        """Buckets that hold something."""
        return len(self._places())

    @property
    def steps(self) -> list[int]:
        """The first step of every bucket that holds something."""
        return [int(place) * self.width for place in self._places()]

    def means(self, column: int = 0) -> list[float | None]:
        """The mean of a column in every bucket that holds something."""
        places = self._places()
        counts, sums = self._counts[places, column], self._sums[places, column]
        found: list[Any] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).tolist()
        return [None if value != value else value for value in found]

    def mean(self, since: int = 0) -> list[float | None]:
        """Means of all columns over everything from a step on, to a bucket's precision."""
        self._take()
        first = since // self.width
        counts, sums = self._counts[first:].sum(axis=0), self._sums[first:].sum(axis=0)
        return [s / c if c else None for s, c in zip(sums.tolist(), counts.tolist(), strict=True)]
