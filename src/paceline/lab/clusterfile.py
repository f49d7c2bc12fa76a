"""Cluster files.

name = "one-straggler"
description = "three equal workers and one at a third of their speed"
mechanism = "paced"         # how workers are made unlike:
                            #   paced: a step takes fixed_s + per_sample_s * samples, by sleeping what is left
                            #   cgroup: the kernel gives each worker `cores` of CPU time
                            #   mps: one NVIDIA GPU, `gpu_share` percent of it for each worker
                            #   mixed: `device` "cuda" or "cpu" for each worker, with gpu_share or cores if wanted
fixed_s = 0.02              # paced: what a step costs any worker, whatever its batch
per_sample_s = 0.002        # paced: what a sample costs a worker of speed 1

[[workers]]                 # workers of one machine; or [[nodes]], below
count = 3                   # default 1
speed = 3.0                 # paced; default 1; divides per_sample_s

[[workers]]
fixed_s = 0.03              # overrides the cluster's
max_local_batch = 64        # most samples the worker holds; paceline is told
memory_mib = 512            # enforced: an out-of-memory error beyond it

[[nodes]]                   # instead of [[workers]]: several machines
name = "site-a"
link = { up_mbit = 200, down_mbit = 200, latency_ms = 5 }     # to all other nodes; one way; left out: not limited
[[nodes.workers]]
count = 2

[[disturbances]]
worker = 0                  # or "all"
kind = "slow"               # multiplies the worker's time by `factor` (paced), or divides its quota (cgroup)
factor = 3.0
from_step = 60              # or from_s, seconds since the worker's first step
until_step = 120            # or until_s; left out: to the end

Other kinds: "delay" adds `seconds` to every step (paced). "drift" multiplies by a random walk: every `every_steps` steps the
logarithm moves by a normal number of width `spread`, within 1/most and most (paced). "bursts": every `every_steps` steps, with
a `chance`, `seconds = [least, most]` are added to each step for `lasts = [least, most]` such periods (paced). "pause" stops
the worker's process for `seconds`. "hog" runs `hogs` busy processes beside the worker, in its cgroup if it has one.
"drop" takes a node's link down: `node = "site-a"`. Random kinds take a `seed`.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, unknown_name
from paceline.lab.cluster import MECHANISMS, Cluster, Disturbance, Link, Node, WorkerSpec
from paceline.lab.tomlfile import Section, read_text

_BY_MECHANISM = {
    "paced": {"speed", "fixed_s", "per_sample_s"},
    "cgroup": {"cores"},
    "mps": {"gpu_share"},
    "mixed": {"device", "cores", "gpu_share"},
}
_WORKER_KEYS = {"count", "max_local_batch", "memory_mib"}
_WHEN = {"from_step", "until_step", "from_s", "until_s"}
_KINDS: dict[str, set[str]] = {
    "slow": {"factor"},
    "delay": {"seconds"},
    "drift": {"every_steps", "spread", "most", "seed"},
    "bursts": {"every_steps", "chance", "seconds", "lasts", "seed"},
    "pause": {"seconds"},
    "hog": {"hogs"},
    "drop": set(),
}
LEAST_CORES = 0.01
_ONLY_PACED = ("delay", "drift", "bursts")


def load(name_or_path: str) -> Cluster:
    """The cluster of a file, or one that ships with the package, by its name.

    Raises:
        ConfigError: there is no such file or cluster, or it breaks a rule.
    """
    path = Path(name_or_path)
    shipped_names = [entry.name for entry in shipped()]
    if path.is_file():
        text = read_text(path)
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
    top = Section.parse(text, where)
    top.only({"name", "description", "mechanism", "fixed_s", "per_sample_s", "workers", "nodes", "disturbances"})
    mechanism = top.choice("mechanism", "paced", MECHANISMS)
    if "workers" in top and "nodes" in top:
        raise top.error("a cluster has [[workers]] of one machine or [[nodes]] with workers, not both", "nodes")
    workers: list[WorkerSpec] = []
    nodes: list[Node] = []
    for entry in top.tables("workers"):
        workers += _workers(entry, top, mechanism)
    for entry in top.tables("nodes"):
        entry.only({"name", "link", "workers"})
        here = [worker for table in entry.tables("workers") for worker in _workers(table, top, mechanism)]
        if not here:
            raise entry.error("a node must have at least one [[nodes.workers]] table")
        name = _file_name(entry, f"node-{len(nodes)}")
        if name in [node.name for node in nodes]:
            raise entry.error(f"nodes must have names of their own, got {name!r} twice", "name")
        workers += here
        nodes.append(Node(name, len(here), _link(entry)))
    if not workers:
        raise ConfigError(f"{where} must have at least one [[workers]] table, or [[nodes]] with workers")
    nodes = nodes or [Node("node-0", len(workers))]
    disturbances: list[Disturbance] = []
    for entry in top.tables("disturbances"):
        disturbances += _disturbance(entry, len(workers), nodes, mechanism)
    name = _file_name(top, Path(where).stem)
    return Cluster(name, top.text("description"), tuple(workers), tuple(disturbances), mechanism, tuple(nodes))


def _file_name(entry: Section, default: str) -> str:
    name = entry.text("name", default)
    if not re.fullmatch(r"[\w.+-]{1,60}", name):
        raise entry.error(f"name must be letters, digits, '.', '+', '-' or '_', at most 60, got {name!r}", "name")
    return name


def _workers(entry: Section, top: Section, mechanism: str) -> list[WorkerSpec]:
    mine = _BY_MECHANISM[mechanism]
    for key in entry.data:
        others = [other for other, keys in _BY_MECHANISM.items() if key in keys and key not in mine]
        if others:
            raise entry.error(
                f"{key} is for mechanism {' and '.join(others)}, but this cluster's mechanism is {mechanism!r}", key
            )
    entry.only(_WORKER_KEYS | mine)
    values: dict[str, Any] = {}
    if mechanism == "paced":
        speed = entry.number("speed", 1.0, above_zero=True)
        values["fixed_s"] = entry.number("fixed_s", top.number("fixed_s"))
        values["per_sample_s"] = entry.number("per_sample_s", top.number("per_sample_s", 0.001)) / speed
    if mechanism == "mixed":
        values["device"] = entry.choice("device", "cpu", ("cpu", "cuda"))
        other = {"cpu": "gpu_share", "cuda": "cores"}[values["device"]]
        if other in entry:
            raise entry.error(f"{other} means nothing for a worker on device {values['device']!r}", other)
    for key, most in (("cores", 1024.0), ("gpu_share", 100.0)):
        if key in mine and (mechanism != "mixed" or key in entry):
            if key not in entry:
                raise entry.error(f"mechanism {mechanism!r} needs {key} for every worker")
            values[key] = entry.number(key, above_zero=True, most=most)
    if values.get("cores", 1.0) < LEAST_CORES:
        raise entry.error(
            f"cores must be at least {LEAST_CORES:g}, the least the kernel gives, got {values['cores']:g}", "cores"
        )
    if "memory_mib" in entry:
        values["memory_mib"] = entry.number("memory_mib", above_zero=True)
    values["max_local_batch"] = entry.whole("max_local_batch", least=1) or None
    return [WorkerSpec(**values)] * entry.whole("count", 1, least=1)


def _link(entry: Section) -> Link:
    link = entry.table("link")
    link.only({"up_mbit", "down_mbit", "latency_ms"})
    up, down = (link.number(name, above_zero=True) if name in link else None for name in ("up_mbit", "down_mbit"))
    return Link(up, down, link.number("latency_ms"))


def _disturbance(entry: Section, num_workers: int, nodes: list[Node], mechanism: str) -> list[Disturbance]:
    kind = entry.choice("kind", "slow", tuple(_KINDS))
    target = "node" if kind == "drop" else "worker"
    entry.only({"kind", target} | _WHEN | _KINDS[kind])
    if mechanism != "paced" and kind in _ONLY_PACED:
        raise entry.error(f"kind {kind!r} needs a paced cluster, this one is {mechanism}", "kind")
    if mechanism in ("mps", "mixed") and kind == "slow":
        raise entry.error(f"kind 'slow' needs mechanism paced or cgroup, this one is {mechanism}", "kind")
    for key in ("factor", "seconds", "spread"):
        if key in _KINDS[kind] and key not in entry:
            raise entry.error(f"kind {kind!r} needs {key}")
    values: dict[str, Any] = {name: entry.whole(name) for name in ("from_step", "until_step") if name in entry}
    values |= {name: entry.number(name) for name in ("from_s", "until_s") if name in entry}
    for first, last in (("from_step", "until_step"), ("from_s", "until_s")):
        if last in values and values[last] <= values.get(first, -1):
            raise entry.error(f"{last} must come after {first}, got {values[last]:g}", last)
    if kind == "bursts":
        values["seconds"] = entry.interval("seconds", (0.0, 0.0))
    elif "seconds" in entry:
        values["seconds"] = (entry.number("seconds", above_zero=kind == "pause"),) * 2
    values["factor"] = entry.number("factor", 1.0, above_zero=True)
    if mechanism == "cgroup" and values["factor"] > 100:
        raise entry.error(f"factor must be at most 100 for a quota, got {values['factor']:g}", "factor")
    values["lasts"] = entry.interval("lasts", (1.0, 1.0))
    values["every_steps"] = entry.whole("every_steps", 1, least=1)
    values["chance"] = entry.number("chance", 1.0, most=1.0)
    values["spread"] = entry.number("spread")
    values["most"] = entry.number("most", 4.0, above_zero=True)
    if values["most"] < 1:
        raise entry.error(f"most must be at least 1, got {values['most']:g}", "most")
    values["seed"] = entry.whole("seed")
    values["hogs"] = entry.whole("hogs", 1, least=1)
    if kind == "drop":
        names = [node.name for node in nodes]
        name = entry.text("node")
        if name not in names:
            raise unknown_name(f"node at {entry.at('node')}", name, names)
        return [Disturbance(kind, node=names.index(name), **values)]
    worker = entry.data.get("worker")
    if worker == "all":
        return [Disturbance(kind, each, **values) for each in range(num_workers)]
    if not isinstance(worker, int) or isinstance(worker, bool) or not 0 <= worker < num_workers:
        raise entry.error(f'worker must be 0 to {num_workers - 1} or "all", got {worker!r}', "worker")
    return [Disturbance(kind, worker, **values)]
