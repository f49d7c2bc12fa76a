"""A cluster of unlike workers: nodes, workers, links, and what disturbs them. Files: `clusterfile`."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.policies.balance.level import least_makespan
from paceline.types import NO_CAP

MECHANISMS = ("paced", "cgroup", "mps", "mixed")
FROM_OUTSIDE = ("pause", "hog", "drop", "slow")  # done to workers and links by the launcher


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is like. Paced, its step takes `fixed_s + per_sample_s * samples` seconds.

    Args:
        fixed_s: what a step costs whatever its batch (paced).
        per_sample_s: what a sample costs (paced).
        max_local_batch: most samples it holds, told to paceline.
        memory_mib: memory beyond what an idle worker uses, enforced.
        cores: CPU quota (cgroup, mixed).
        gpu_share: percent of the GPU (mps, mixed).
        device: "cpu" or "cuda" (mixed); "" leaves it to the script.
    """

    fixed_s: float = 0.0
    per_sample_s: float = 0.0
    max_local_batch: int | None = None
    memory_mib: float | None = None
    cores: float | None = None
    gpu_share: float | None = None
    device: str = ""


@dataclass(frozen=True)
class Link:
    """What joins a node to the others; None is not limited. A packet from a to b takes both their latencies.

    Args:
        up_mbit: most that leaves the node, in 10^6 bits per second, headers included.
        down_mbit: most that reaches it.
        latency_ms: added to every packet, in either direction.
    """

    up_mbit: float | None = None
    down_mbit: float | None = None
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in (("up_mbit", self.up_mbit), ("down_mbit", self.down_mbit)):
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"{name} must be above 0, got {rate}: leave it out for a link without limit")
        if not 0 <= self.latency_ms < math.inf:
            raise ConfigError(f"latency_ms must be at least 0, got {self.latency_ms}")

    @property
    def free(self) -> bool:
        """Whether it limits nothing."""
        return self.up_mbit is None and self.down_mbit is None and self.latency_ms == 0


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, with the next `num_workers` of its workers."""

    name: str
    num_workers: int
    link: Link = field(default_factory=Link)


@dataclass(frozen=True)
class Disturbance:
    """Something that happens to a worker, or to a node's link, for a while.

    Times count from the first step of that worker, or of worker 0 for a link.
    """

    kind: str
    worker: int = -1
    node: int = -1
    factor: float = 1.0
    seconds: tuple[float, float] = (0.0, 0.0)
    from_step: int | None = None
    until_step: int | None = None
    from_s: float | None = None
    until_s: float | None = None
    every_steps: int = 1
    chance: float = 1.0
    lasts: tuple[float, float] = (1.0, 1.0)
    spread: float = 0.0
    most: float = 4.0
    seed: int = 0
    hogs: int = 1

    def active(self, step: int, elapsed_s: float) -> bool:
        """Whether it is felt at this step."""
        begun = step >= self.from_step if self.from_step is not None else elapsed_s >= (self.from_s or 0.0)
        over = (self.until_step is not None and step >= self.until_step) or (
            self.until_s is not None and elapsed_s >= self.until_s
        )
        return begun and not over

    def felt(self, step: int) -> tuple[float, float]:
        """What it multiplies a paced worker's time by, and the seconds it adds, at an active step."""
        if self.kind == "slow":
            return self.factor, 0.0
        if self.kind == "delay":
            return 1.0, self.seconds[0]
        if self.kind == "drift":
            return _walk(self, step // self.every_steps), 0.0
        if self.kind == "bursts":
            return 1.0, _burst(self, step // self.every_steps)
        return 1.0, 0.0


@lru_cache(maxsize=4096)
def _walk(drift: Disturbance, period: int) -> float:
    """A random walk in the logarithm, reflected at 1/most and most; the same for everybody who asks."""
    generator, position, edge = random.Random(f"{drift.seed}/{drift.worker}"), 0.0, math.log(drift.most)
    for _ in range(period):
        position += generator.gauss(0.0, drift.spread)
        if abs(position) > edge:
            position = math.copysign(2 * edge, position) - position
            position = max(-edge, min(edge, position))
    return math.exp(position)


@lru_cache(maxsize=4096)
def _burst(bursts: Disturbance, period: int) -> float:
    """Seconds added in this period: with a chance a burst begins, of random size, and lasts some periods."""
    generator, until, size = random.Random(f"{bursts.seed}/{bursts.worker}"), 0, 0.0
    for now in range(period + 1):
        if now >= until:
            size = 0.0
            if generator.random() < bursts.chance:
                size = generator.uniform(*bursts.seconds)
                until = now + round(generator.uniform(*bursts.lasts))
    return size


@dataclass(frozen=True)
class Cluster:
    """A cluster of unlike workers."""

    name: str
    description: str
    workers: tuple[WorkerSpec, ...]
    disturbances: tuple[Disturbance, ...] = ()
    mechanism: str = "paced"
    nodes: tuple[Node, ...] = ()
    paced_links: bool = False

    @property
    def linked(self) -> bool:
        """Whether links between nodes have to be emulated."""
        return any(not node.link.free for node in self.nodes) or any(one.kind == "drop" for one in self.disturbances)

    def node_of(self, worker: int) -> int:
        """The node a worker is on."""
        end = 0
        for number, node in enumerate(self.nodes):
            end += node.num_workers
            if worker < end:
                return number
        return 0

    def spec(self, worker: int, step: int, elapsed_s: float) -> WorkerSpec:
        """What the paced worker is like at that moment, disturbances included."""
        base = self.workers[worker]
        fixed, per_sample = base.fixed_s, base.per_sample_s
        for one in self.disturbances:
            if one.worker == worker and one.active(step, elapsed_s):
                factor, seconds = one.felt(step)
                fixed, per_sample = fixed * factor + seconds, per_sample * factor
        return WorkerSpec(fixed, per_sample, base.max_local_batch)

    def step_s(self, worker: int, samples: int, step: int, elapsed_s: float) -> float:
        """How long a step with that many samples takes the paced worker."""
        spec = self.spec(worker, step, elapsed_s)
        return spec.fixed_s + spec.per_sample_s * samples

    def optimum(self, total: int, step: int = 0, elapsed_s: float = 0.0) -> tuple[tuple[int, ...], float]:
        """The best split of a global batch at that moment, and the time of its slowest worker; paced clusters only."""
        if self.mechanism != "paced":
            raise ConfigError(f"only a paced cluster's optimum is known; {self.name!r} is {self.mechanism}")
        specs = [self.spec(worker, step, elapsed_s) for worker in range(len(self.workers))]
        fixed = np.array([spec.fixed_s for spec in specs])
        slope = np.array([max(spec.per_sample_s, 1e-12) for spec in specs])
        lower = np.full(len(specs), min(1, total // len(specs)))
        cap = np.array([spec.max_local_batch or NO_CAP for spec in specs])
        if total > int(cap.sum()):
            raise ConfigError(f"cluster {self.name!r} holds at most {int(cap.sum())} samples a step, got {total}")
        split = least_makespan(fixed, slope, total, lower, cap)
        return tuple(split.tolist()), float((fixed + slope * split).max())

    def exchange_s(self, num_bytes: int) -> float:
        """What a ring sum of that many bytes takes over the links, were everything else free.

        With n workers each link carries 2 (n-1)/n of the bytes in both directions, in 2 (n-1) turns one after the other, each
        as late as the latest hop between nodes.
        """
        if len(self.nodes) < 2:
            return 0.0
        turns = 2 * (len(self.workers) - 1)
        rates = [rate for node in self.nodes for rate in (node.link.up_mbit, node.link.down_mbit) if rate is not None]
        late = sorted((node.link.latency_ms for node in self.nodes), reverse=True)
        sending = turns / len(self.workers) * num_bytes * 8 / (min(rates) * 1e6) if rates else 0.0
        return sending + turns * (late[0] + late[1]) / 1e3

    def shares(self) -> tuple[float, ...]:
        """Each worker's speed by its file: one over the paced time of a sample, the quota, or the part of the GPU.

        Nobody knows what a CPU is to a GPU: on a mixed cluster all are 1.
        """
        if self.mechanism == "paced":
            return tuple(1.0 / max(worker.per_sample_s, 1e-12) for worker in self.workers)
        if self.mechanism == "mixed":
            return (1.0,) * len(self.workers)
        return tuple(worker.gpu_share or worker.cores or 1.0 for worker in self.workers)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Cluster:
        """What `plain` returned."""
        pairs = ("seconds", "lasts")
        return cls(
            data["name"],
            data["description"],
            tuple(WorkerSpec(**worker) for worker in data["workers"]),
            tuple(Disturbance(**{**one, **{k: tuple(one[k]) for k in pairs}}) for one in data["disturbances"]),
            data["mechanism"],
            tuple(Node(one["name"], one["num_workers"], Link(**one["link"])) for one in data["nodes"]),
            data["paced_links"],
        )
