"""Run a case: several contenders on one emulated cluster, blocks of their steps in turn; then take the figures."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.comm.launch import Job, Silent, launch
from paceline.lab.clusterfile import load


@dataclass(frozen=True)
class Case:
    """What to run.

    Args:
        name: what to call it.
        cluster: which emulated workers.
        contenders: who takes part.
        batch_size: the global batch.
        blocks: how often each contender has its turn.
        block_steps: steps in a turn.
        warm_up: steps of each contender left out of the figures.
        repeat: how many times the 1437 images make up the dataset, which sets the length of an epoch.
    """

    name: str
    cluster: str
    contenders: tuple[str, ...]
    batch_size: int
    blocks: int
    block_steps: int
    warm_up: int
    repeat: int = 1


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case; returns per contender the time of every step (the slowest rank's) and its split."""
    out = folder / case.name
    out.mkdir(parents=True)
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    job = Job(
        ["-m", "benchmarks.worker", str(out), json.dumps(asdict(case))],
        len(load(case.cluster).workers),
        out / "logs",
        {"PYTHONPATH": path},
    )
    launch(job, Silent())
    ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(job.nproc)]
    steps = {
        name: [max(times) for times in zip(*([step[0] for step in rank["times"][name]] for rank in ranks), strict=True)]
        for name in case.contenders
    }
    first = {name: [bool(step[1]) for step in ranks[0]["times"][name]] for name in case.contenders}
    return {"case": asdict(case), "steps": steps, "first": first, "splits": ranks[0]["splits"]}


def middle(values: list[float]) -> tuple[float, float]:
    """Median and half the interquartile range."""
    quarters = statistics.quantiles(values, n=4)
    return statistics.median(values), (quarters[2] - quarters[0]) / 2


def settled(result: dict[str, Any], name: str) -> list[float]:
    """Step times after warm-up; the first step of a block is left out."""
    warm = result["case"]["warm_up"]
    pairs = list(zip(result["steps"][name], result["first"][name], strict=True))[warm:]
    return [seconds for seconds, first in pairs if not first]


def changes(result: dict[str, Any], name: str) -> list[int]:
    """Steps at which a contender's split changed."""
    splits = result["splits"][name]
    return [number for number in range(1, len(splits)) if splits[number] != splits[number - 1]]
