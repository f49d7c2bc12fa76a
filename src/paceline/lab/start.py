"""Running a script on an emulated cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from paceline.comm.launch import Job, Screen, launch
from paceline.errors import ConfigError
from paceline.lab.cluster import Cluster


def lab_dir(run_dir: Path) -> Path:
    """Where the lab keeps its own record of a run."""
    return run_dir / "lab"


def run_on(
    cluster: Cluster, script: Path, arguments: list[str], run_dir: Path, env: Mapping[str, str], screen: Screen
) -> None:
    """Start the cluster's workers on this machine, each with its pace, and run the script on them.

    Args:
        cluster: what to emulate.
        script: the training script, untouched.
        arguments: its arguments.
        run_dir: folder for logs and records; must not hold a lab record yet.
        env: environment to add.
        screen: where output goes.
    """
    folder = lab_dir(run_dir)
    if (folder / "cluster.json").exists():
        raise ConfigError(f"{run_dir} holds the record of an earlier run: choose another --run-dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cluster.json").write_text(json.dumps(cluster.plain(), indent=1))
    except OSError as error:
        raise ConfigError(f"the run folder must be writable: cannot write {folder} ({error.strerror})") from error
    command = ["-m", "paceline.lab.worker", str(folder), str(script), *arguments]
    launch(Job(command, len(cluster.workers), run_dir / "logs", env), screen)
