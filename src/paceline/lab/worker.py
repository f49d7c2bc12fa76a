"""What the lab starts in place of a script: makes this process the worker it plays, then runs the script as it is.

python -m paceline.lab.worker LAB_DIR train.py [arguments]
python -m paceline.lab.worker LAB_DIR -m package.module [arguments]
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
from pathlib import Path

from paceline.process import NODE

SOLO = "PACELINE_LAB_SOLO"  # which worker a world of one plays
STEPS = "PACELINE_LAB_STEPS"  # after how many steps the script is over


def record_path(lab_dir: Path, worker: int) -> Path:
    """The record of a worker's steps."""
    return lab_dir / f"worker-{worker:04d}.jsonl"


def pid_path(lab_dir: Path, worker: int) -> Path:
    """Where a worker leaves its process id, for disturbances."""
    return lab_dir / f"worker-{worker:04d}.pid"


def main() -> None:
    """Become the worker, then run the script."""
    lab_dir, script, *arguments = sys.argv[1:]
    folder = Path(lab_dir)
    worker = int(os.environ.get(SOLO, os.environ["RANK"]))

    from paceline.lab.cgroup import join
    from paceline.lab.cluster import Cluster

    join(worker)
    cluster = Cluster.from_plain(json.loads((folder / "cluster.json").read_text()))
    spec = cluster.workers[worker]
    os.environ[NODE] = cluster.nodes[cluster.node_of(worker)].name
    if spec.device == "cpu" or cluster.mechanism == "cgroup":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if spec.gpu_share is not None:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{spec.gpu_share:g}"
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[
            0
        ]  # shares of one GPU

    from paceline.lab.paced import Pacer
    from paceline.process import die_with_launcher

    die_with_launcher()
    pid_path(folder, worker).write_text(str(os.getpid()))
    if spec.memory_mib is not None:
        _limit_memory(spec.memory_mib)
    steps = os.environ.get(STEPS)
    Pacer(cluster, worker, record_path(folder, worker), most_steps=int(steps) if steps else None).install()
    if script == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _limit_memory(mebibytes: float) -> None:
    """Allow so much beyond what the process has now: of the GPU if it has one, of address space if not."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, mebibytes * 2**20 / total))
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(mebibytes * 2**20), resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
