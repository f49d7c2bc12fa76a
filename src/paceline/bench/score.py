"""Tests of a run, made after it from the replicas its workers kept: writing one takes milliseconds, testing it would take seconds, in
which exchanges under way would go on for free.

Replicas that differ are tested as their plain mean, whoever trained them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from paceline.bench.task import Rows, Workload

_LOSS_ROWS = 2000


def mean(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The mean of the replicas kept at a step; what is not of floating point as the first worker has it."""
    paths = sorted(folder.glob(f"replica-{step}-*.pt"), key=_rank)
    total: dict[str, torch.Tensor] = torch.load(paths[0])
    for path in paths[1:]:
        for name, value in torch.load(path).items():
            if value.is_floating_point():
                total[name] += value
    return {name: value / len(paths) if value.is_floating_point() else value for name, value in total.items()}


def score(folder: Path, workload: Workload, device: torch.device) -> None:
    """Test every replica that was kept, add the scores to the marks, and delete the replicas."""
    steps = sorted({int(path.name.split("-")[1]) for path in folder.glob("replica-*.pt")})
    if not steps:
        return
    marks = folder / "marks.jsonl"
    ends = {mark["step"]: mark["train_s"] for mark in map(json.loads, marks.read_text().splitlines())}
    test = workload.data()[1].to(device)
    some = Rows(*(tensor[:_LOSS_ROWS] for tensor in test.tensors))
    model = workload.model().to(device).eval()
    with marks.open("a", encoding="utf-8") as file, torch.no_grad():
        for step in steps:
            model.load_state_dict(mean(folder, step))
            found = {"score": workload.score(model, test), "loss": float(workload.loss(model, some.tensors))}
            file.write(json.dumps({"step": step, "train_s": ends[step], **found}) + "\n")
    for path in folder.glob("replica-*.pt"):
        path.unlink()


def _rank(path: Path) -> int:
    return int(re.findall(r"\d+", path.stem)[-1])
