"""Disturbances that come from outside a worker: it is stopped for a while, robbed of its core, or cut off.

The clock of a disturbance is the worker's own record of its steps: it starts with the first one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import LaunchError
from paceline.lab.cgroup import Groups
from paceline.lab.cluster import FROM_OUTSIDE, Cluster, Disturbance
from paceline.lab.worker import pid_path, record_path
from paceline.process import LAUNCHER

POLL_S = 0.05


@dataclass
class _Clock:
    """How far a worker is, by its record."""

    path: Path
    steps: int = 0
    _offset: int = 0
    _since: float | None = None

    def read(self) -> tuple[int, float] | None:
        """Steps made and seconds since the first; None before it."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            self._offset += len(data)
            self.steps += data.count(b"\n")
        if self.steps and self._since is None:
            self._since = time.monotonic()
        return (self.steps, time.monotonic() - self._since) if self._since is not None else None


@dataclass
class _Act:
    """A disturbance and where it stands."""

    spec: Disturbance
    clock: _Clock
    begun: bool = False
    over: bool = False
    since: float = 0.0
    hogs: list[subprocess.Popen[bytes]] = field(default_factory=list)


class Director:
    """Carries out a cluster's disturbances while its workers run.

    Args:
        cluster: what is emulated.
        lab_dir: where workers leave their records and process ids.
        groups: the workers' cgroups, if they have any.
        network: the nodes' links, if they are emulated.
        env: environment for the processes it starts.
    """

    def __init__(
        self, cluster: Cluster, lab_dir: Path, groups: Groups | None, network: Any, env: dict[str, str]
    ) -> None:
        self._cluster, self._lab_dir, self._groups, self._network, self._env = cluster, lab_dir, groups, network, env
        chosen = [
            one
            for one in cluster.disturbances
            if one.kind in FROM_OUTSIDE and not (one.kind == "slow" and cluster.mechanism == "paced")
        ]
        self._acts = [_Act(one, _Clock(record_path(lab_dir, max(one.worker, 0)))) for one in chosen]
        self._failed: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-director", daemon=True)

    def __enter__(self) -> Director:
        if self._acts:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        for act in self._acts:
            if act.begun and not act.over:
                self._end(act)
        if self._failed is not None and error is None:
            raise LaunchError(
                f"a disturbance could not be carried out, so the run is not what the file says: {self._failed}"
            )

    def _run(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                for act in self._acts:
                    now = act.clock.read()
                    if now is not None and not act.over:
                        self._look(act, *now)
        except Exception as error:
            self._failed = error

    def _look(self, act: _Act, steps: int, elapsed_s: float) -> None:
        if not act.begun and act.spec.active(steps, elapsed_s):
            act.begun, act.since = True, time.monotonic()
            self._begin(act)
        elif act.begun:
            pause_over = act.spec.kind == "pause" and time.monotonic() - act.since >= act.spec.seconds[0]
            if pause_over or not act.spec.active(steps, elapsed_s):
                self._end(act)
                act.over = True

    def _begin(self, act: _Act) -> None:
        spec = act.spec
        if spec.kind == "pause":
            self._signal(spec.worker, signal.SIGSTOP)
        elif spec.kind == "hog":
            command = [sys.executable, "-m", "paceline.lab.hog", str(spec.worker)]
            environment = {**os.environ, **self._env, LAUNCHER: str(os.getpid())}
            act.hogs = [subprocess.Popen(command, env=environment) for _ in range(spec.hogs)]
        elif spec.kind == "slow" and self._groups is not None:
            self._groups.set(spec.worker, (self._cluster.workers[spec.worker].cores or 1.0) / spec.factor)
        elif spec.kind == "drop" and self._network is not None:
            self._network.drop(spec.node)

    def _end(self, act: _Act) -> None:
        spec = act.spec
        if spec.kind == "pause":
            self._signal(spec.worker, signal.SIGCONT)
        elif spec.kind == "hog":
            for hog in act.hogs:
                hog.kill()
                hog.wait()
        elif spec.kind == "slow" and self._groups is not None:
            self._groups.set(spec.worker, self._cluster.workers[spec.worker].cores or 1.0)
        elif spec.kind == "drop" and self._network is not None:
            self._network.restore(spec.node)

    def _signal(self, worker: int, number: int) -> None:
        try:
            os.kill(int(pid_path(self._lab_dir, worker).read_text()), number)
        except (OSError, ValueError):  # it has ended
            pass
