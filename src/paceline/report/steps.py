"""Single steps of a run, by phase, read from the files again: for a closer look than a summary keeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.report.follow import Follower, workers
from paceline.report.run import Run
from paceline.report.worker import step_rows

MOST = 4000  # spans drawn at once
PARTS = ("data", "compute", "exchange", "optimizer")


@dataclass(frozen=True)
class Places:
    """What is needed to look at steps without the run itself, which may be read on meanwhile.

    Args:
        files: the first event file of every worker.
        begins: where in them to begin.
        ends: where in them the last step is, or something before it.
        offsets: how far each worker's clock is ahead.
        size: how many workers.
    """

    files: dict[int, Path]
    begins: dict[int, tuple[int, int]]
    ends: dict[int, tuple[int, int]]
    offsets: dict[int, float]
    size: int


def places(run: Run, first: int, last: int) -> Places:
    """Where to look for a step and those after it."""
    files = workers(run.folder)
    followers = {rank: run.workers[rank].follower for rank in files if rank in run.workers}
    begins, ends = (
        {rank: follower.place(step) for rank, follower in followers.items() if follower is not None}
        for step in (first, last)
    )
    return Places(files, begins, ends, run.offsets(), run.size)


def spans(look: Places, first: int, last: int) -> dict[str, Any] | None:
    """Every phase of every step from `first` to `last`, on one clock; None if that is more than a screen can show.

    Args:
        look: where to look.
        first: a step.
        last: a later one.
    """
    if last < first or (last - first + 1) * len(PARTS) * max(1, look.size) > MOST:
        return None
    lines: dict[str, dict[str, Any]] = {
        name: {"name": name, "base": [], "x": [], "y": [], "steps": []} for name in PARTS
    }
    origin: float | None = None
    for rank, path in look.files.items():
        begin, end = look.begins.get(rank, (-1, 0)), look.ends.get(rank, (-1, 0))
        for step, at, _, *phases in _rows(Follower(path, begin), first, last, end):
            when = at - look.offsets.get(rank, 0.0)
            origin = when if origin is None else min(origin, when)
            for name, took in zip(PARTS, phases, strict=True):
                line = lines[name]
                line["base"].append(when)
                line["x"].append(took * 1e3)
                line["y"].append(f"worker {rank}")
                line["steps"].append(step)
                when += took
    if origin is None:
        return None
    for line in lines.values():
        line["base"] = [(when - origin) * 1e3 for when in line["base"]]
    return {
        "id": "steps",
        "title": f"Steps {first} to {last}, phase by phase",
        "text": "Milliseconds from the first of them, all workers on one clock. Waiting for others is part of the exchange here.",
        "kind": "spans",
        "x_title": "ms",
        "y_title": "worker",
        "lines": list(lines.values()),
    }


def _rows(follower: Follower, first: int, last: int, end: tuple[int, int]) -> list[tuple[float, ...]]:
    """The steps of one worker from `first` to `last`; of one that was done again, the last time."""
    follower.skip = lambda kind, step: kind != "steps"
    found: dict[float, tuple[float, ...]] = {}
    for event in follower.new():
        try:
            rows = step_rows(event) if event["type"] == "steps" else []
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # damaged: counted when the run was read
        if rows and follower.place_of_line > end and rows[0][0] > last:
            break
        found = {step: row for step, row in found.items() if not rows or step < rows[0][0]}
        found |= {row[0]: row for row in rows if first <= row[0] <= last}
    return [found[step] for step in sorted(found)]
