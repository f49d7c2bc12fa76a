"""Running a script on an emulated cluster. Whatever is made for it is undone, however it ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.comm.launch import Job, Screen, launch
from paceline.errors import ConfigError
from paceline.lab import cgroup, mps, netns
from paceline.lab.cluster import Cluster
from paceline.lab.director import Director
from paceline.lab.nodes import launch_nodes
from paceline.lab.worker import SOLO, STEPS


def lab_dir(run_dir: Path) -> Path:
    """Where the lab keeps its own record of a run."""
    return run_dir / "lab"


@dataclass(frozen=True)
class Start:
    """What every worker runs.

    Args:
        script: the training script, untouched; or a module, as `-m NAME`.
        arguments: its arguments.
        run_dir: folder for logs and records; must not hold a lab record yet.
        env: environment to add.
        python: the interpreter.
        most_steps: end every worker after so many steps.
    """

    script: Path | str
    arguments: list[str]
    run_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    most_steps: int | None = None

    @property
    def command(self) -> list[str]:
        """After the interpreter."""
        script = str(self.script).split(" ", 1) if str(self.script).startswith("-m ") else [str(self.script)]
        return ["-m", "paceline.lab.worker", str(lab_dir(self.run_dir)), *script, *self.arguments]

    def prepare(self, cluster: Cluster) -> Path:
        """The lab's folder, with the cluster written into it."""
        folder = lab_dir(self.run_dir)
        if (folder / "cluster.json").exists():
            raise ConfigError(f"{self.run_dir} holds the record of an earlier run: choose another --run-dir")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cluster.json").write_text(json.dumps(cluster.plain(), indent=1))
        except OSError as error:
            raise ConfigError(f"the run folder must be writable: cannot write {folder} ({error.strerror})") from error
        return folder


def run_on(cluster: Cluster, start: Start, screen: Screen) -> None:
    """Start the cluster's workers on this machine, each as unlike as its file says, and run the script on them."""
    folder = start.prepare(cluster)
    clean()
    with ExitStack() as stack:
        env, groups = _mechanisms(cluster, stack, start)
        links = [node.link for node in cluster.nodes]
        network = stack.enter_context(netns.Network(links)) if cluster.linked and not cluster.paced_links else None
        stack.enter_context(Director(cluster, folder, groups, network, env))
        logs = start.run_dir / "logs"
        if network is not None:
            launch_nodes(cluster, network, start.command, logs, env, start.python, screen)
            crossed = [network.crossed(number) for number in range(len(cluster.nodes))]
            (folder / "links.json").write_text(
                json.dumps({"up": [up for up, _ in crossed], "down": [d for _, d in crossed]})
            )
        else:
            launch(Job(start.command, len(cluster.workers), logs, env, start.python), screen)


def run_alone(cluster: Cluster, worker: int, start: Start, screen: Screen) -> None:
    """Run the script in a world of one, as one worker of the cluster: nobody to wait for, nothing to exchange, no mishaps."""
    cluster = replace(cluster, paced_links=False, disturbances=())
    start.prepare(cluster)
    clean()
    with ExitStack() as stack:
        env, _ = _mechanisms(cluster, stack, start)
        launch(Job(start.command, 1, start.run_dir / "logs", {**env, SOLO: str(worker)}, start.python), screen)


def _mechanisms(cluster: Cluster, stack: ExitStack, start: Start) -> tuple[dict[str, str], cgroup.Groups | None]:
    env, groups = dict(start.env), None
    if start.most_steps is not None:
        env[STEPS] = str(start.most_steps)
    if any(worker.cores is not None for worker in cluster.workers):
        groups = stack.enter_context(cgroup.Groups([worker.cores for worker in cluster.workers]))
        env[cgroup.BASE] = str(groups.base)
    if any(worker.gpu_share is not None for worker in cluster.workers):
        env |= stack.enter_context(mps.Daemon()).env
    return env, groups


def clean() -> list[str]:
    """Undo what an earlier lab left behind because it was killed; only what bears the name of a lab that is gone."""
    return [*netns.clean(), *cgroup.clean(), *mps.clean()]


def overloaded(cluster: Cluster) -> str | None:
    """A warning if the cluster asks for more than this machine has, with the factor."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = sum(worker.cores or 0.0 for worker in cluster.workers)
    share = sum(worker.gpu_share or 0.0 for worker in cluster.workers)
    if asked > cores:
        return (
            f"the workers' quotas add up to {asked:g} cores, {asked / cores:.1f} times the {cores} of this machine: they "
            f"will be slower than the file says"
        )
    if share > 100:
        return f"the workers' GPU shares add up to {share:g} %, {share / 100:.1f} times one GPU: they will take from each other"
    if cluster.mechanism == "paced" and len(cluster.workers) > 4 * cores:
        return (
            f"{len(cluster.workers)} paced workers on {cores} cores, {len(cluster.workers) / cores:.0f} on each: if their real "
            f"arithmetic takes longer than the file's times, they will be slower than it says (the summary tells)"
        )
    return None
