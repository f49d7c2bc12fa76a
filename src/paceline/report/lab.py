"""The lab's own record of a run to figures: what was measured from outside, the same way for every contender."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.lab.cluster import Cluster

WARM_UP_STEPS = 2
NOT_TRAINING = 3.0  # an interval this many times the median had an evaluation or a checkpoint in it


@dataclass(frozen=True)
class LabSteps:
    """Every step of a run on an emulated cluster.

    Args:
        cluster: what was emulated.
        split: samples of each worker, by step.
        took_s: time each worker took from forward to its last gradient, by step.
        interval_s: time from the moment the slowest worker was ready in the step before to the same in this one.
        ideal_s: what the best split would have taken at that step; empty if nobody knows (not a paced cluster).
        overrun: how many times its paced time a worker really took, the worst of them (median over steps).
    """

    cluster: Cluster
    split: list[list[int]]
    took_s: list[list[float]]
    interval_s: list[float]
    ideal_s: list[float]
    overrun: float = 0.0

    @property
    def counted(self) -> list[int]:
        """Steps that enter the figures: warmed up, and training alone."""
        later = self.interval_s[WARM_UP_STEPS:]
        if not later:
            return []
        bound = NOT_TRAINING * statistics.median(later)
        return [s for s in range(WARM_UP_STEPS, len(self.interval_s)) if self.interval_s[s] <= bound]

    def summary(self) -> dict[str, Any]:
        """The figures of the run."""
        counted = self.counted
        if not counted:
            raise ConfigError(
                f"too few steps to measure: {len(self.interval_s)}, at least {WARM_UP_STEPS + 1} are needed"
            )
        time_s = sum(self.interval_s[s] for s in counted)
        ideal_s = sum(self.ideal_s[s] for s in counted) if self.ideal_s else None
        samples = sum(sum(self.split[s]) for s in counted)
        workers = [
            {
                "worker": worker,
                "samples_per_step": sum(self.split[s][worker] for s in counted) / len(counted),
                "busy_s": sum(self.took_s[s][worker] for s in counted) / len(counted),
                "idle_share": 1 - sum(self.took_s[s][worker] for s in counted) / time_s,
            }
            for worker in range(len(self.cluster.workers))
        ]
        return {
            "cluster": self.cluster.name,
            "mechanism": self.cluster.mechanism,
            "steps": len(self.interval_s),
            "steps_counted": len(counted),
            "step_s": statistics.median(self.interval_s[s] for s in counted),
            "samples_per_s": samples / time_s,
            "limit_samples_per_s": samples / ideal_s if ideal_s else None,
            "share_of_limit": ideal_s / time_s if ideal_s else None,
            "overrun": self.overrun,
            "workers": workers,
        }


def read_lab(folder: Path) -> LabSteps:
    """The record in a run's `lab` folder."""
    cluster = Cluster.from_plain(json.loads((folder / "cluster.json").read_text()))
    records = []
    for worker in range(len(cluster.workers)):
        path = folder / f"worker-{worker:04d}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records.append([json.loads(line) for line in lines if line.endswith("}")])
    num_steps = min(len(record) for record in records)
    steps = [[record[s] for record in records] for s in range(num_steps)]
    ready = [max(one["at"] for one in step) for step in steps]
    intervals = [max(one["took_s"] for one in steps[0])] if steps else []
    intervals += [after - before for before, after in itertools.pairwise(ready)]
    ideal = []
    paced = cluster.mechanism == "paced"
    for step in steps if paced else []:
        _, best = cluster.optimum(sum(one["samples"] for one in step), step[0]["step"], step[0]["elapsed_s"])
        ideal.append(best)
    return LabSteps(
        cluster,
        [[one["samples"] for one in step] for step in steps],
        [[one["took_s"] for one in step] for step in steps],
        intervals,
        ideal,
        max((_overrun(record) for record in records if record), default=0.0) if paced else 0.0,
    )


def _overrun(record: list[dict[str, float]]) -> float:
    return statistics.median(one["took_s"] / max(one["due_s"], 1e-9) for one in record)
