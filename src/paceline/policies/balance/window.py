"""From the steps of a window, one point per worker: the step from raw times to an `Observation`."""

from __future__ import annotations

import numpy as np

from paceline.policies.balance.level import Floats
from paceline.types import Limits, Observation

COLUMNS = ("samples", "data_wait_s", "compute_s", "comm_s", "optimizer_s", "round_s", "step")


def observe(rows: Floats, *, step: int, epoch: int, ends_epoch: bool, total: int, limits: Limits) -> Observation:
    """Summarise a window.

    A plan may have changed within the window: the typical time of a worker is the median over the steps that had the
    batch of its latest one. The median ignores a single disturbed step; its standard error comes from the median absolute deviation.

    Args:
        rows: shape (workers, steps, columns), columns as in `COLUMNS`, short last batches left out; rows of NaN where a worker
            has nothing to tell.
        step: the last step of the window.
        epoch: its epoch.
        ends_epoch: whether the epoch ended with it.
        total: the global batch the next plan divides.
        limits: the bounds on the split.

    Returns:
        The observation that balance policies decide on.
    """
    samples, data, compute, _, optimizer = (rows[:, :, column] for column in range(5))  # times of one's own
    busy = data + compute + optimizer
    there = np.isfinite(busy) & (samples > 0)
    num_workers = len(samples)
    out: dict[str, list[float]] = {name: [0.0] * num_workers for name in ("b", "busy", "noise", "wall", "compute")}
    for i in range(num_workers):
        mine = there[i]
        if not mine.any():
            continue
        batch = samples[i][mine][-1]
        chosen = np.sort(busy[i][mine & (samples[i] == batch)])
        count = len(chosen)
        median = float(chosen[(count - 1) // 2] + chosen[count // 2]) / 2
        deviation = np.sort(np.abs(chosen - median))
        mad = float(deviation[(count - 1) // 2] + deviation[count // 2]) / 2
        out["b"][i], out["busy"][i] = float(batch), median
        out["noise"][i] = 1.2533 * 1.4826 * mad / count**0.5 if count >= 3 else 0.0
        out["wall"][i] = _mean(busy[i][mine])
        out["compute"][i] = _mean(compute[i][mine])
    return Observation(
        step=step,
        epoch=epoch,
        ends_epoch=ends_epoch,
        total=total,
        limits=limits,
        samples=tuple(out["b"]),
        busy_s=tuple(out["busy"]),
        noise_s=tuple(out["noise"]),
        wall_s=tuple(out["wall"]),
        compute_s=tuple(out["compute"]),
        num_steps=int(there.sum(axis=1).max()),
    )


def _mean(values: Floats) -> float:
    total = 0.0
    for value in values.tolist():  # in order: the same bits on every machine
        total += value
    return total / len(values)
