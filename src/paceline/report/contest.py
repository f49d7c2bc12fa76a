"""Several ways to train one task on one emulated cluster, side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.lab.start import lab_dir
from paceline.report.lab import LabSteps, read_lab


@dataclass(frozen=True)
class Entry:
    """One contender's run.

    Args:
        name: what to call it.
        steps: the lab's record, with intervals of training alone: the script's marks leave evaluation out.
        tests: (step, seconds of training, accuracy) of every evaluation.
    """

    name: str
    steps: LabSteps
    tests: list[tuple[int, float, float]]

    def figures(self, target: float) -> dict[str, Any]:
        """What the table shows."""
        summary = self.steps.summary()
        reached = [train_s for _, train_s, accuracy in self.tests if accuracy >= target]
        return {
            "name": self.name,
            "samples_per_s": summary["samples_per_s"],
            "share_of_limit": summary["share_of_limit"],
            "median_step_s": summary["step_s"],
            "time_to_target_s": reached[0] if reached else None,
            "final_accuracy": self.tests[-1][2],
        }


def read_entry(name: str, run_dir: Path) -> Entry:
    """A contender's run folder: the lab's record and the script's marks."""
    marks = [json.loads(line) for line in (run_dir / "marks.jsonl").read_text().splitlines()]
    tests = [(int(m["step"]), float(m["train_s"]), float(m["score"])) for m in marks if "score" in m]
    if not tests:
        raise ConfigError(f"{run_dir} has no evaluation: the run was too short")
    ends = [0.0, *(float(m["train_s"]) for m in marks if "score" not in m)]
    steps = read_lab(lab_dir(run_dir))
    intervals = [after - before for before, after in pairwise(ends)][: len(steps.interval_s)]
    return Entry(name, replace(steps, interval_s=intervals), tests)


def draw(entries: list[Entry], chosen: str, path: Path) -> None:
    """A picture of step time over steps for all contenders, and of the chosen one's split."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6.4), sharex=True, layout="constrained")
    cluster = entries[0].steps.cluster
    for entry in entries:
        steps = entry.steps.counted
        above.plot(steps, [1e3 * entry.steps.interval_s[s] for s in steps], label=entry.name, linewidth=1.2)
    best = entries[0].steps
    above.plot(
        best.counted, [1e3 * best.ideal_s[s] for s in best.counted], "k--", linewidth=1, label="best possible split"
    )
    above.set_ylabel("step time (ms)")
    above.set_ylim(0, 1.25 * above.get_ylim()[1])
    above.legend(loc="upper left", fontsize=9, ncols=4)
    above.set_title(f"{cluster.name}: {cluster.description}", fontsize=11)
    own = next(entry for entry in entries if entry.name == chosen).steps
    for worker in range(len(cluster.workers)):
        below.step(
            range(len(own.split)), [split[worker] for split in own.split], where="post", label=f"worker {worker}"
        )
    below.set_ylabel(f"samples per step ({chosen})")
    below.set_xlabel("step")
    below.set_ylim(0, 1.25 * below.get_ylim()[1])
    below.legend(loc="upper left", fontsize=9, ncols=len(cluster.workers))
    for disturbance in cluster.disturbances:
        if disturbance.from_step is not None:
            for axes in (above, below):
                axes.axvline(disturbance.from_step, color="grey", linewidth=0.8, linestyle=":")
            above.annotate(
                f"worker {disturbance.worker} slows {disturbance.factor:g}x",
                (disturbance.from_step, above.get_ylim()[1] * 0.04),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=9,
            )
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
