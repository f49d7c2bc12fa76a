"""One worker of one run: `python -m paceline.bench.train SPEC_JSON`."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch

from paceline.bench.task import Task
from paceline.bench.workloads import workload


def main() -> None:
    """Train as the contender the file names."""
    path = Path(sys.argv[1])
    spec = json.loads(path.read_text())
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    task = Task(
        workload(spec["workload"]),
        spec["batch_size"],
        spec["steps"],
        spec["test_every"],
        spec["seed"],
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        device,
        spec["options"],
        path.parent / "marks.jsonl",
        spec["train_rows"],
        spec["samples"],
        spec["test_samples"],
        spec["usual_batch"],
    )
    import_module(f"paceline.bench.contenders.{spec['module']}").train(task)


if __name__ == "__main__":
    main()
