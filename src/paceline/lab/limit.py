"""The physical limit of a cluster: what each worker does alone, added up. Measured, never assumed."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise

from paceline.comm.launch import Screen
from paceline.errors import ConfigError
from paceline.lab.cluster import Cluster
from paceline.lab.start import Start, lab_dir, run_alone
from paceline.lab.worker import record_path

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Solo:
    """One worker alone.

    Args:
        worker: which.
        samples: samples a step.
        step_s: median time from step to step.
        spread_s: half the interquartile range.
    """

    worker: int
    samples: float
    step_s: float
    spread_s: float

    @property
    def samples_per_s(self) -> float:
        """Its rate."""
        return self.samples / self.step_s


def measure(cluster: Cluster, worker: int, start: Start, screen: Screen) -> Solo:
    """Run a script as one worker alone, for `start.most_steps` steps."""
    place = start.run_dir / f"alone-{worker:04d}"
    place.mkdir(parents=True, exist_ok=True)
    run_alone(cluster, worker, replace(start, run_dir=place), screen)
    path = record_path(lab_dir(place), worker)
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    later = records[WARM_UP_STEPS:]
    if len(later) < 4:
        raise ConfigError(
            f"too few steps to measure worker {worker} alone: {len(records)}, at least {WARM_UP_STEPS + 4} are needed. The "
            f"script must train a model in DistributedDataParallel or pace.wrap"
        )
    intervals = [after["at"] - before["at"] for before, after in pairwise(later)]
    quarters = statistics.quantiles(intervals, n=4)
    samples = statistics.mean(one["samples"] for one in later)
    return Solo(worker, samples, statistics.median(intervals), (quarters[2] - quarters[0]) / 2)
