"""Playing a suite: contenders take turns, each run in processes of its own, and what fails is told and passed over."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench.peers import PeerMissing, environment, versions
from paceline.bench.record import figures
from paceline.bench.roster import SOLO, Contender, contender
from paceline.bench.suite import Suite
from paceline.errors import ConfigError
from paceline.lab.cluster import Cluster
from paceline.lab.start import clean
from paceline.policies.balance.shares import split_by_shares
from paceline.process import LAUNCHER
from paceline.types import Limits

SOLO_STEPS = 15
GRACE_S = 60.0  # more than a lab of several nodes takes to end in order


@dataclass(frozen=True)
class Turn:
    """One run to come."""

    workload: str
    cluster: Cluster
    contender: Contender
    seed: int
    batch_size: int
    target: float
    usual_batch: int

    @property
    def place(self) -> str:
        """Its folder in the record."""
        return f"{self.workload}@{self.cluster.name}/{self.contender.name}/seed-{self.seed}"


def turns(suite: Suite, *, limit: bool = True) -> Iterator[Turn]:
    """All runs in order: within a seed, contenders of one case follow each other; each seed begins with another one.

    With `limit` every case first measures its workers alone.
    """
    from paceline.bench.workloads import workload

    for number, seed in enumerate(suite.seeds):
        for name in suite.workloads:
            task = workload(name)
            batch_size, target = suite.batch_size or task.batch_size, suite.target or task.target
            for cluster in suite.clusters:
                shift = number % len(suite.contenders)
                order = [*suite.contenders[shift:], *suite.contenders[:shift]]
                for one in [*([SOLO] if limit else []), *map(contender, order)]:
                    own = one.options.get("batch_size", batch_size)
                    yield Turn(name, cluster, one, seed, own, target, batch_size)


def by_hand(cluster: Cluster, batch_size: int) -> tuple[int, ...]:
    """The split somebody would set by hand who knows the cluster's file: the optimum if paced, else by shares."""
    if cluster.mechanism == "paced":
        return replace(cluster, disturbances=()).optimum(batch_size)[0]
    caps = tuple(worker.max_local_batch for worker in cluster.workers)
    return split_by_shares(cluster.shares(), batch_size, Limits.of(len(caps), cap=caps))


def check(suite: Suite) -> None:
    """Refuse what would fail, or loop for ever, when its turn comes.

    Raises:
        ConfigError: a batch that the workers cannot hold, or that is larger than the data; a dataset that is missing.
    """
    for turn in turns(suite, limit=False):
        size = len(turn.cluster.workers)
        if turn.batch_size < size:
            raise ConfigError(
                f"batch_size must be at least one sample per worker: cluster {turn.cluster.name!r} has {size}, got "
                f"{turn.batch_size}"
            )
        by_hand(turn.cluster, turn.batch_size)
    from paceline.bench.workloads import workload

    for name in suite.workloads:
        rows = len(workload(name).data()[0])  # a missing dataset is said now, not after an hour
        batch_size = max(turn.batch_size for turn in turns(suite, limit=False) if turn.workload == name)
        if batch_size > min(rows, suite.train_rows or rows):
            raise ConfigError(
                f"batch_size must not exceed the rows to train on: {name} has {min(rows, suite.train_rows or rows)}, got "
                f"batch_size={batch_size}"
            )


def play(
    suite: Suite,
    raw: Path,
    peers: Path,
    tell: Callable[[Turn, dict[str, Any]], None],
    tick: Callable[[Turn], None] = lambda turn: None,
    *,
    limit: bool = True,
) -> None:
    """Make every run of a suite.

    Args:
        suite: what to run.
        raw: folder for everything the runs write.
        peers: folder for the peers' environments.
        tell: called after each run with one plain record: what it was, its `status`, and its figures.
        tick: called a few times a second while a run is under way.
        limit: whether to measure workers alone first.
    """
    pythons: dict[str, str | PeerMissing] = {}
    for turn in turns(suite, limit=limit):
        name = turn.contender.name
        peer = turn.contender.peer
        if peer and peer not in pythons:
            try:
                pythons[peer] = str(environment(peer, peers))
            except PeerMissing as error:
                pythons[peer] = error
        python = pythons.get(peer, sys.executable)
        record: dict[str, Any] = {
            "workload": turn.workload,
            "cluster": turn.cluster.name,
            "contender": name,
            "seed": turn.seed,
        }
        if isinstance(python, PeerMissing):
            record |= {"status": "not installed", "reason": python.reason}
        else:
            record |= _run(turn, suite, raw / turn.place, python, partial(tick, turn))
            if peer:
                record["versions"] = versions(peer, Path(python))
        tell(turn, record)
    clean()  # after the last run nobody else would


def _run(turn: Turn, suite: Suite, folder: Path, python: str, tick: Callable[[], None]) -> dict[str, Any]:
    folder.mkdir(parents=True)
    solo = turn.contender is SOLO
    cluster = replace(turn.cluster, disturbances=()) if solo else turn.cluster
    spec = {
        "workload": turn.workload,
        "cluster": cluster.plain(),
        "module": turn.contender.module,
        "options": turn.contender.settings(by_hand(turn.cluster, turn.batch_size)),
        "seed": turn.seed,
        "batch_size": turn.batch_size,
        "steps": SOLO_STEPS if solo else suite.steps,
        "test_every": 0 if solo else suite.test_every,
        "train_rows": suite.train_rows,
        "samples": None if solo else suite.samples,
        "test_samples": None if solo else suite.test_samples,
        "usual_batch": turn.usual_batch,
        "caps": [worker.max_local_batch for worker in cluster.workers],
    }
    path = folder.resolve() / "spec.json"
    path.write_text(json.dumps(spec))
    begun = time.monotonic()
    status, reason = _supervise(path, python, suite.timeout_s, tick)
    found: dict[str, Any] = {"status": status, "wall_s": time.monotonic() - begun}
    if status != "ok":
        return {**found, "reason": reason}
    try:
        if solo:
            return {**found, "solo": _solo(folder, len(cluster.workers))}
        return {**found, "figures": figures(folder, turn.target, suite.warm_up, _better_high(turn.workload))}
    except (
        ConfigError,
        OSError,
        ValueError,
        KeyError,
        ZeroDivisionError,
    ) as error:  # it ended well but left too little
        return {**found, "status": "failed", "reason": f"its record cannot be read: {error}"}


def _better_high(name: str) -> bool:
    from paceline.bench.workloads import workload

    return workload(name).higher_is_better


def _supervise(spec: Path, python: str, timeout_s: float, tick: Callable[[], None]) -> tuple[str, str]:
    """Run, and kill at the timeout: `ok`, `failed` or `killed`, and the reason."""
    with (spec.parent / "launcher.err").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.bench.one", str(spec), python],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, LAUNCHER: str(os.getpid())},
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return "killed", f"did not end within {timeout_s:g} s"
            tick()
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its workers die with it
                process.wait()
    code = process.returncode
    if code == 0:
        return "ok", ""
    text = (spec.parent / "launcher.err").read_text(errors="replace").strip()
    return "failed", "\n".join(text.splitlines()[-12:]) or f"exit code {code}"


def _solo(folder: Path, size: int) -> dict[str, Any]:
    """Rates of the workers alone and all at once, without exchange."""
    seen = [json.loads((folder / f"solo-{rank}.json").read_text()) for rank in range(size)]
    rates = {
        how: [one["samples"] / statistics.median(one[f"{how}_s"]) for one in seen] for how in ("alone", "together")
    }
    return {"samples": [one["samples"] for one in seen], **{f"{how}_per_s": rate for how, rate in rates.items()}}
