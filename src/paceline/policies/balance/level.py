"""How a total is divided over workers whose time is affine in their batch.

A worker with batch b needs `fixed + slope * b` seconds. Dividing a total so that the slowest worker is
as fast as possible is a water-filling problem: pour samples until every worker that can still take some
stands at one common level T,

    T = (total + sum_i fixed_i / slope_i) / sum_i 1 / slope_i,      b_i = (T - fixed_i) / slope_i

with workers outside their bounds held at the bound and the rest solved again.

Sums are taken with `math.fsum` and everything else element by element, so that unlike machines get the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.types import Limits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Solver = Callable[[int, Ints, Ints, Ints, int], Ints]


def water_level(fixed: Floats, slope: Floats, total: float, lower: Floats, cap: Floats) -> Floats:
    """Real-valued batches with sum `total` that minimise the slowest worker's time within the bounds.

    Args:
        fixed: seconds a step costs worker i whatever its batch, >= 0.
        slope: seconds a sample costs worker i, > 0.
        total: what to divide; sum(lower) <= total <= sum(cap).
        lower: fewest samples of worker i.
        cap: most samples of worker i.

    Returns:
        b_i >= 0, as floats.
    """
    speed = 1.0 / slope
    offset = fixed * speed
    batch = np.empty_like(speed)
    free = np.arange(len(speed))
    remaining = total
    while len(free):
        level = (remaining + math.fsum(offset[free].tolist())) / math.fsum(speed[free].tolist())
        want = level * speed[free] - offset[free]
        low, high = want < lower[free], want > cap[free]
        if not low.any() and not high.any():
            batch[free] = want
            break
        deficit = math.fsum((lower[free] - want)[low].tolist())
        excess = math.fsum((want - cap[free])[high].tolist())
        # The true level is lower than this one if clamping adds more than it removes, and then those
        # below their bound stay there; otherwise the same holds for those above their cap.
        held, bound = (low, lower) if deficit >= excess else (high, cap)
        batch[free[held]] = bound[free[held]]
        remaining -= math.fsum(bound[free[held]].tolist())
        free = free[~held]
    return batch


def least_makespan(fixed: Floats, slope: Floats, total: int, lower: Ints, cap: Ints) -> Ints:
    """Whole batches with sum `total` that minimise max_i fixed_i + slope_i * b_i within the bounds.

    The floor of the real-valued optimum never exceeds some whole-number optimum, and giving the left-over
    samples one by one to the worker that would finish first is optimal from there on.
    """
    ideal = water_level(fixed, slope, total, lower.astype(float), cap.astype(float))
    batch: Ints = np.clip(np.floor(ideal).astype(np.int64), lower, cap)
    left = total - int(batch.sum())
    if left < 0:  # an ideal that was whole, rounded up in the last bit
        for _ in range(-left):
            level = np.where(batch > lower, fixed + slope * batch, -np.inf)
            batch[int(np.argmax(level))] -= 1
        return batch
    if left == 0:
        return batch
    # Every single sample that could be given next, as (level it would reach, worker): all those up to a
    # level that certainly suffices. The `left` lowest of them are the greedy choice.
    first = np.where(batch < cap, fixed + slope * (batch + 1), np.inf)
    by_level = np.sort(first)
    enough = by_level[min(left, int(np.isfinite(by_level).sum())) - 1]
    count = np.floor((enough - fixed) / slope) - batch + 1
    if len(by_level) < left or not np.isfinite(by_level[left - 1]):
        count[:] = left
    count = np.clip(count, 0, np.minimum(cap - batch, left)).astype(np.int64)
    who = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(who)) - np.repeat(np.cumsum(count) - count, count)
    level = fixed[who] + slope[who] * (batch[who] + 1 + nth)
    chosen = who[np.argsort(level, kind="stable")[:left]]
    return batch + np.bincount(chosen, minlength=len(batch))


def largest_remainder(ideal: Floats, total: int, lower: Ints, cap: Ints) -> Ints:
    """Round real-valued batches to whole ones that keep the total and the bounds.

    Everyone gets the floor; what is left goes to the largest fractional parts, ties to the lower index.

    >>> none, most = np.zeros(4, np.int64), np.full(4, 64)
    >>> largest_remainder(np.array([13.7, 16.5, 19.6, 14.2]), 64, none, most).tolist()
    [14, 16, 20, 14]
    """
    batch: Ints = np.clip(np.floor(ideal).astype(np.int64), lower, cap)
    left = total - int(batch.sum())
    while left > 0:
        order = np.argsort(np.where(batch < cap, batch - ideal, np.inf), kind="stable")
        order = order[batch[order] < cap[order]][:left]
        batch[order] += 1
        left -= len(order)
    while left < 0:
        order = np.argsort(np.where(batch > lower, ideal - batch, np.inf), kind="stable")
        order = order[batch[order] > lower[order]][:-left]
        batch[order] -= 1
        left += len(order)
    return batch


def divide(total: int, limits: Limits, time_per_sample: Floats, solve: Solver) -> tuple[int, ...]:
    """Divide `total` samples within `limits`, in units of the granularity.

    Where the total does not reach every worker's lower bound (a short last batch, a global batch smaller
    than the number of workers), the slowest workers get 0 and the others share it.

    Args:
        total: samples to divide, >= 1.
        limits: bounds and granularity.
        time_per_sample: decides who idles and who takes the remainder: smallest first.
        solve: (units, lower, cap, who, granularity) -> units for each of `who`.

    Returns:
        Samples for each worker; the sum is `total`.
    """
    limits.check(total)
    lower, cap = limits.lower_array, limits.cap_array
    g = limits.granularity if total >= limits.granularity else 1
    cap_units = cap // g
    low_units = np.minimum(-(-lower // g), cap_units)
    units, remainder = divmod(total, g)
    who = np.arange(len(lower))
    if int(low_units.sum()) > units:
        by_speed = np.argsort(time_per_sample, kind="stable")
        reach = np.cumsum(low_units[by_speed])
        num_active = max(1, int(np.searchsorted(reach, units, side="right")))
        who = np.sort(by_speed[:num_active])
        if int(low_units[who].sum()) > units:
            low_units = np.zeros_like(low_units)
        if int(cap_units[who].sum()) < units:
            who, low_units = np.arange(len(lower)), np.zeros_like(low_units)
    batch = np.zeros(len(lower), np.int64)
    batch[who] = solve(units, low_units[who], cap_units[who], who, g) * g
    if remainder:  # fewer than g samples: whole to one worker, an active one if its cap allows
        by_speed = np.argsort(time_per_sample, kind="stable")
        fits = [i for i in by_speed.tolist() if batch[i] + remainder <= cap[i]]
        batch[next((i for i in fits if batch[i]), fits[0])] += remainder
    return tuple(batch.tolist())
