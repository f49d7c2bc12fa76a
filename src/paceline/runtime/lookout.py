"""What every window tells those who look on: how long steps took, who waited, who has fallen behind."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.comm import Comm
from paceline.events import EventLog
from paceline.policies.balance.window import COLUMNS
from paceline.policies.straggler import Watch
from paceline.types import Observation, to_plain

Rows = NDArray[np.float64]
_LOGGER = logging.getLogger("paceline")
_OWN = [COLUMNS.index(name) for name in ("data_wait_s", "compute_s", "optimizer_s")]


class Lookout:
    """Writes windows, and says once who has fallen behind.

    Args:
        comm: the door to the other workers.
        log: where it goes.

    Attributes:
        past: what is known of every worker.
    """

    def __init__(self, comm: Comm, log: EventLog) -> None:
        self._comm, self._log, self._watch = comm, log, Watch()
        self.past = self._watch.init(comm.size)

    def take(self, times: Rows, seen: Observation) -> None:
        """A window of steps.

        Args:
            times: shape (workers, steps, columns), as in `COLUMNS`.
            seen: what the policy sees of it.
        """
        if self._log.tells and (found := told_of(times, seen)):
            self._log.write("window", **found)
        if not any(seen.samples):
            return
        behind, self.past = self._watch.update(
            seen.step - seen.num_steps + 1,
            np.array(seen.samples),
            np.array(seen.busy_s),
            np.array(seen.noise_s),
            _medians(times[:, :, _OWN]),
            exchange_s(times) or 0.0,
            self.past,
        )
        for one in behind:
            self._log.write("straggler", step=seen.step, **to_plain(one))
            if self._comm.rank == 0:
                _LOGGER.warning("paceline: %s", one.text)


def told_of(times: Rows, seen: Observation) -> dict[str, Any]:
    """What a `window` event says; nothing where not everybody has told."""
    there: NDArray[np.bool_] = np.asarray(np.isfinite(times).all(axis=2))
    if not there.any(axis=1).all():
        return {}
    counts = there.sum(axis=1)
    means = np.where(there[:, :, None], times, 0.0).sum(axis=1) / counts[:, None]  # of everybody's own steps
    samples, data, compute, comm, optimizer, rounds, _ = means.T
    busy, comm = data + compute + optimizer, comm + rounds
    step_s = busy + comm
    rate = float(samples.sum() / step_s.mean())  # local steps end at different times
    with np.errstate(divide="ignore", invalid="ignore"):
        able = float(np.where(samples > 0, samples / busy, 0.0).sum())
    shared = _aligned(times)[:, :, [COLUMNS.index("comm_s"), COLUMNS.index("round_s")]].sum(axis=2)
    exchange = (
        float(shared.min(axis=0).mean()) if shared.size else float(comm.min())
    )  # whoever is last waits for that alone
    return {
        "step": seen.step,
        "epoch": seen.epoch,
        "observation": seen,
        "step_s": step_s.tolist(),
        "comm_s": comm.tolist(),
        "exchange_s": exchange,
        "waiting_s": np.maximum(0.0, comm - exchange).tolist(),
        "samples_per_s": rate,
        "efficiency": rate / able if able else None,
    }


def _aligned(times: Rows) -> Rows:
    """The steps that everybody has told of, in order; workers leave out different ones."""
    steps = times[:, :, COLUMNS.index("step")]
    shared = [step for step in steps[0].tolist() if math.isfinite(step) and (steps == step).any(axis=1).all()]
    chosen = [times[np.arange(len(times)), (steps == step).argmax(axis=1)] for step in shared]
    found: Rows = np.stack(chosen, axis=1) if chosen else np.empty((len(times), 0, len(COLUMNS)))
    return found[:, np.isfinite(found).all(axis=(0, 2))]


def exchange_s(times: Rows) -> float | None:
    """The exchange of a window's typical step: whoever is last to be ready waits for it alone; None if not everybody told."""
    exchange = _aligned(times)[:, :, COLUMNS.index("comm_s")].min(axis=0)
    there = exchange[np.isfinite(exchange)]
    return float(np.median(there)) if there.size else None


def _medians(rows: Rows) -> Rows:
    """Of every worker and column, over the steps that are there; 0 where there is none."""
    there = np.isfinite(rows.sum(axis=2)).any(axis=1)
    found = np.zeros((len(rows), rows.shape[2]))
    if there.any():
        found[there] = np.nanmedian(rows[there], axis=1)
    return found
