"""Suites: workloads x clusters x contenders x seeds.

name = "unlike"
description = "four workers of speeds 1:2:3:4"
workloads = ["cnn-fashion"]
clusters = ["four-unlike"]          # names that ship, or files beside the suite
contenders = ["ddp", "hand-tuned", "affine"]
seeds = [1, 2]                      # runs of each; contenders take turns within a seed
steps = 100                         # optimizer steps of each run
test_every = 10                     # steps between evaluations; they do not count as training time
samples = 300000                    # instead of steps and test_every, where contenders differ in their batch
test_samples = 6000
warm_up = 10                        # steps left out of samples/s; time to target counts every step but the first
batch_size = 256                    # default: the workload's
target = 0.8                        # default: the workload's; test accuracy or loss
train_rows = 5120                   # default: all; sets the length of an epoch
timeout_s = 300                     # a run that takes longer is killed and reported

[[paper]]                           # a published figure to stand beside ours
cluster = "four-unlike"
contender = "affine"
against = "ddp"
time_ratio = 0.77                   # time of the contender over time of the other, for the same samples
source = "where it is from"
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.bench.roster import contender
from paceline.bench.workloads import check
from paceline.errors import ConfigError, unknown_name
from paceline.lab.cluster import Cluster
from paceline.lab.clusterfile import load as load_cluster
from paceline.lab.tomlfile import Section, read_text

_KEYS = {
    "name",
    "description",
    "workloads",
    "clusters",
    "contenders",
    "seeds",
    "steps",
    "samples",
    "test_samples",
    "test_every",
    "warm_up",
    "batch_size",
    "target",
    "train_rows",
    "timeout_s",
    "paper",
}


@dataclass(frozen=True)
class Paper:
    """A published ratio of times."""

    cluster: str
    contender: str
    against: str
    time_ratio: float
    source: str


@dataclass(frozen=True)
class Suite:
    """What to run; see the file's form above."""

    name: str
    description: str
    workloads: tuple[str, ...]
    clusters: tuple[Cluster, ...]
    contenders: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    test_every: int
    warm_up: int
    batch_size: int | None
    target: float | None
    train_rows: int | None
    timeout_s: float
    paper: tuple[Paper, ...] = ()
    samples: int | None = None
    test_samples: int | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON values, clusters in full."""
        return asdict(self)


def load(name_or_path: str) -> Suite:
    """The suite of a file, or one that ships, by its name."""
    path = Path(name_or_path)
    if path.is_file():
        return parse(read_text(path), name_or_path, path.parent)
    if name_or_path in shipped():
        text = resources.files("paceline.bench.suites").joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8")
        return parse(text, f"{name_or_path}.toml")
    if path.suffix == ".toml" or "/" in name_or_path:
        raise ConfigError(f"there is no suite file {name_or_path}. `paceline bench list` lists those that ship")
    raise unknown_name("suite", name_or_path, shipped())


def shipped() -> list[str]:
    """Names of the suites that ship with the package."""
    folder = resources.files("paceline.bench.suites")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def parse(text: str, where: str, beside: Path | None = None) -> Suite:
    """A suite from TOML.

    Args:
        text: the file's contents.
        where: what to call it in errors.
        beside: where cluster files may be.
    """
    top = Section.parse(text, where)
    top.only(_KEYS)
    for key in ("workloads", "clusters", "contenders"):
        if key not in top:
            raise top.error(f"a suite needs {key}")
    workloads = top.list_of("workloads", str, ())
    contenders = top.list_of("contenders", str, ())
    for name, checked in [*((one, check) for one in workloads), *((one, contender) for one in contenders)]:
        try:
            checked(name)
        except ConfigError as error:
            raise top.error(str(error), "workloads" if checked is check else "contenders") from None
    clusters = []
    for name in top.list_of("clusters", str, ()):
        near = beside / name if beside is not None else None
        try:
            clusters.append(load_cluster(str(near) if near is not None and near.is_file() else name))
        except ConfigError as error:
            raise top.error(str(error), "clusters") from None
    seeds = top.list_of("seeds", int, (1,))
    for key, names in (("workloads", workloads), ("clusters", [one.name for one in clusters]), ("seeds", seeds)):
        if len(set(names)) < len(names):
            raise top.error(f"{key} must differ from each other, got {names}", key)
    steps = top.whole("steps", 100, least=1)
    samples = top.whole("samples", least=1) or None
    warm_up = top.whole("warm_up", 10)
    if warm_up + 2 > steps:
        raise top.error(f"steps must exceed warm_up by at least 2, got steps={steps}, warm_up={warm_up}", "steps")
    papers = []
    for entry in top.tables("paper"):
        entry.only({"cluster", "contender", "against", "time_ratio", "source"})
        one = Paper(
            entry.text("cluster"),
            entry.text("contender"),
            entry.text("against"),
            entry.number("time_ratio", above_zero=True),
            entry.text("source"),
        )
        for kind, value, known in (
            ("cluster", one.cluster, [cluster.name for cluster in clusters]),
            ("contender", one.contender, contenders),
            ("against", one.against, contenders),
        ):
            if value not in known:
                raise unknown_name(f"{kind} at {entry.at(kind)}", value, known)
        papers.append(one)
    return Suite(
        top.text("name", Path(where).stem),
        top.text("description"),
        tuple(workloads),
        tuple(clusters),
        tuple(dict.fromkeys(contenders)),
        tuple(seeds),
        steps,
        top.whole("test_every", 10),
        warm_up,
        top.whole("batch_size", least=1) or None,
        top.number("target", above_zero=True) if "target" in top else None,
        top.whole("train_rows", least=1) or None,
        top.number("timeout_s", 600.0, above_zero=True),
        tuple(papers),
        samples,
        top.whole("test_samples", max(1, samples // 50), least=1) if samples else None,
    )
