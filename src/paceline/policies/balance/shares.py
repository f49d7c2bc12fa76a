"""Dividing a total in proportion to given shares; what `equal`, `fixed` and the published rule have in common."""

from __future__ import annotations

import numpy as np

from paceline.policies.balance.level import Ints, divide, largest_remainder, water_level
from paceline.types import Limits


def split_by_shares(shares: tuple[float, ...], total: int, limits: Limits) -> tuple[int, ...]:
    """Whole batches proportional to `shares`, within the limits, with the total kept.

    A worker held at a bound hands the rest to the others in proportion to their shares.

    >>> split_by_shares((1.0, 1.0, 1.0), 64, Limits.of(3))
    (22, 21, 21)
    >>> split_by_shares((1.0, 1.0, 2.0), 64, Limits.of(3, cap=(None, None, 20)))
    (22, 22, 20)
    """
    time_per_sample = 1.0 / np.array(shares)
    none = np.zeros(len(shares))

    def solve(units: int, lower: Ints, cap: Ints, who: Ints, g: int) -> Ints:
        ideal = water_level(none[who], time_per_sample[who], units, lower.astype(float), cap.astype(float))
        return largest_remainder(ideal, units, lower, cap)

    return divide(total, limits, time_per_sample, solve)
