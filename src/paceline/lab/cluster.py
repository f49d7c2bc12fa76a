"""Cluster files: which workers there are, how fast each is, and what disturbs them.

name = "one-straggler"
description = "three equal workers and one at a third of their speed"
fixed_s = 0.02              # what a step costs any worker, whatever its batch
per_sample_s = 0.002        # what a sample costs a worker of speed 1

[[workers]]
count = 3                   # default 1
speed = 3.0                 # default 1; divides per_sample_s

[[workers]]
fixed_s = 0.03              # overrides the cluster's
max_local_batch = 64        # most samples the worker holds

[[disturbances]]
worker = 0
kind = "slow"               # multiplies the worker's time by `factor`; "delay" adds `seconds` to every step
factor = 3.0
from_step = 60              # or from_s, seconds since the worker's first step
until_step = 120            # or until_s; left out: to the end
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError, unknown_name
from paceline.policies.balance.level import least_makespan
from paceline.types import NO_CAP

MECHANISMS = ("paced",)


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's step takes `fixed_s + per_sample_s * samples` seconds."""

    fixed_s: float
    per_sample_s: float
    max_local_batch: int | None = None


@dataclass(frozen=True)
class Disturbance:
    """Something that slows one worker for a while."""

    worker: int
    kind: str
    factor: float = 1.0
    seconds: float = 0.0
    from_step: int | None = None
    until_step: int | None = None
    from_s: float | None = None
    until_s: float | None = None

    def active(self, step: int, elapsed_s: float) -> bool:
        """Whether it is felt at this step."""
        begun = step >= self.from_step if self.from_step is not None else elapsed_s >= (self.from_s or 0.0)
        over = (self.until_step is not None and step >= self.until_step) or (
            self.until_s is not None and elapsed_s >= self.until_s
        )
        return begun and not over


@dataclass(frozen=True)
class Cluster:
    """A cluster of unlike workers."""

    name: str
    description: str
    workers: tuple[WorkerSpec, ...]
    disturbances: tuple[Disturbance, ...] = ()
    mechanism: str = "paced"

    def spec(self, worker: int, step: int, elapsed_s: float) -> WorkerSpec:
        """What the worker is like at that moment, disturbances included."""
        base = self.workers[worker]
        fixed, per_sample = base.fixed_s, base.per_sample_s
        for disturbance in self.disturbances:
            if disturbance.worker == worker and disturbance.active(step, elapsed_s):
                fixed, per_sample = fixed * disturbance.factor, per_sample * disturbance.factor
                fixed += disturbance.seconds
        return WorkerSpec(fixed, per_sample, base.max_local_batch)

    def step_s(self, worker: int, samples: int, step: int, elapsed_s: float) -> float:
        """How long a step with that many samples takes the worker."""
        spec = self.spec(worker, step, elapsed_s)
        return spec.fixed_s + spec.per_sample_s * samples

    def optimum(self, total: int, step: int = 0, elapsed_s: float = 0.0) -> tuple[tuple[int, ...], float]:
        """The best split of a global batch at that moment, and the time of its slowest worker."""
        specs = [self.spec(worker, step, elapsed_s) for worker in range(len(self.workers))]
        fixed = np.array([spec.fixed_s for spec in specs])
        slope = np.array([max(spec.per_sample_s, 1e-12) for spec in specs])
        lower = np.full(len(specs), min(1, total // len(specs)))
        cap = np.array([spec.max_local_batch or NO_CAP for spec in specs])
        if total > int(cap.sum()):
            raise ConfigError(f"cluster {self.name!r} holds at most {int(cap.sum())} samples a step, got {total}")
        split = least_makespan(fixed, slope, total, lower, cap)
        return tuple(split.tolist()), float((fixed + slope * split).max())

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Cluster:
        """What `plain` returned."""
        return cls(
            data["name"],
            data["description"],
            tuple(WorkerSpec(**worker) for worker in data["workers"]),
            tuple(Disturbance(**one) for one in data["disturbances"]),
            data["mechanism"],
        )


def load(name_or_path: str) -> Cluster:
    """The cluster of a file, or one that ships with the package, by its name.

    Raises:
        ConfigError: there is no such file or cluster, or it breaks a rule.
    """
    path = Path(name_or_path)
    shipped_names = [entry.name for entry in shipped()]
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    elif name_or_path in shipped_names:
        text = resources.files("paceline.lab.clusters").joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml" or "/" in name_or_path:
        raise ConfigError(f"there is no cluster file {name_or_path}. `paceline lab clusters` lists those that ship")
    else:
        raise unknown_name("cluster", name_or_path, shipped_names)
    return parse(text, name_or_path)


def shipped() -> list[Cluster]:
    """The clusters that ship with the package."""
    folder = resources.files("paceline.lab.clusters")
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda entry: entry.name)
    return [parse(entry.read_text(encoding="utf-8"), entry.name) for entry in files]


def parse(text: str, where: str) -> Cluster:
    """A cluster from TOML.

    Args:
        text: the file's contents.
        where: what to call it in errors.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None
    _keys(data, {"name", "description", "mechanism", "fixed_s", "per_sample_s", "workers", "disturbances"}, where)
    mechanism = data.get("mechanism", "paced")
    if mechanism not in MECHANISMS:
        raise unknown_name(f"mechanism in {where}", mechanism, MECHANISMS)
    workers: list[WorkerSpec] = []
    for number, entry in enumerate(_tables(data, "workers", where)):
        at = f"{where}, workers entry {number + 1}"
        _keys(entry, {"count", "speed", "fixed_s", "per_sample_s", "max_local_batch"}, at)
        speed = _number(entry, "speed", 1.0, at, above_zero=True)
        fixed = _number(entry, "fixed_s", data.get("fixed_s", 0.0), at)
        per_sample = _number(entry, "per_sample_s", data.get("per_sample_s", 0.001), at)
        count = _whole(entry, "count", 1, at)
        cap = _whole(entry, "max_local_batch", 0, at) or None
        workers += [WorkerSpec(fixed, per_sample / speed, cap)] * count
    if not workers:
        raise ConfigError(f"{where} must have at least one [[workers]] table")
    disturbances = tuple(
        _disturbance(entry, len(workers), f"{where}, disturbances entry {number + 1}")
        for number, entry in enumerate(_tables(data, "disturbances", where))
    )
    name = str(data.get("name", Path(where).stem))
    return Cluster(name, str(data.get("description", "")), tuple(workers), disturbances, mechanism)


def _disturbance(entry: dict[str, Any], num_workers: int, at: str) -> Disturbance:
    _keys(entry, {"worker", "kind", "factor", "seconds", "from_step", "until_step", "from_s", "until_s"}, at)
    worker = _whole(entry, "worker", -1, at)
    if not 0 <= worker < num_workers:
        raise ConfigError(f"{at}: worker must be 0 to {num_workers - 1}, got {entry.get('worker')!r}")
    kind = entry.get("kind", "slow")
    if kind not in ("slow", "delay"):
        raise unknown_name(f"kind in {at}", str(kind), ("slow", "delay"))
    if kind == "slow" and "factor" not in entry:
        raise ConfigError(f"{at}: kind 'slow' needs a factor")
    if kind == "delay" and "seconds" not in entry:
        raise ConfigError(f"{at}: kind 'delay' needs seconds")
    whole: dict[str, Any] = {name: _whole(entry, name, 0, at) for name in ("from_step", "until_step") if name in entry}
    real: dict[str, Any] = {name: _number(entry, name, 0.0, at) for name in ("from_s", "until_s") if name in entry}
    factor = _number(entry, "factor", 1.0, at, above_zero=True)
    return Disturbance(worker, kind, factor, _number(entry, "seconds", 0.0, at), **whole, **real)


def _tables(data: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    tables = data.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{where}: {name} must be [[{name}]] tables")
    return tables


def _keys(data: dict[str, Any], known: set[str], where: str) -> None:
    for key in data:
        if key not in known:
            raise unknown_name(f"key in {where}", key, known)


def _number(data: dict[str, Any], name: str, default: Any, where: str, *, above_zero: bool = False) -> float:
    value = data.get(name, default)
    wrong = not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value)
    if wrong or value < 0 or (above_zero and value == 0):
        raise ConfigError(
            f"{where}: {name} must be a number {'above' if above_zero else 'of at least'} 0, got {value!r}"
        )
    return float(value)


def _whole(data: dict[str, Any], name: str, default: int, where: str) -> int:
    value = data.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and name in data):
        raise ConfigError(f"{where}: {name} must be a whole number of at least 0, got {value!r}")
    return value
