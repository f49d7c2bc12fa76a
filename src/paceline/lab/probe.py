"""What this machine can emulate."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

from paceline.lab import cgroup, mps, netns
from paceline.lab.cluster import Cluster


@dataclass(frozen=True)
class Found:
    """One mechanism: whether it works here, and how, or what to do about it."""

    name: str
    works: bool
    sentence: str


def probe() -> list[Found]:
    """Try every mechanism."""
    gpu, gpu_sentence = mps.probe()
    mixed = "CPU and GPU workers in one world over gloo" if gpu else f"needs a GPU: {gpu_sentence}"
    return [
        Found("paced", True, "each step takes the time of the cluster file; needs nothing"),
        Found("cgroup", *cgroup.probe()),
        Found("mps", gpu, gpu_sentence),
        Found("mixed", gpu, mixed),
        Found("links", *netns.probe()),
        Found("paced links", True, "the time of a gradient sum over the file's links is slept; needs nothing"),
    ]


def machine() -> dict[str, Any]:
    """What this machine is, for records."""
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def missing(cluster: Cluster, found: list[Found]) -> list[Found]:
    """The mechanisms a cluster needs and this machine does not have."""
    needed = {cluster.mechanism}
    if cluster.mechanism == "mixed":
        if any(worker.cores is not None for worker in cluster.workers):
            needed.add("cgroup")
        if any(worker.gpu_share is not None for worker in cluster.workers):
            needed.add("mps")
    if cluster.linked and not cluster.paced_links:
        needed.add("links")
    return [one for one in found if one.name in needed and not one.works]
