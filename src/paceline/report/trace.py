"""A run as a trace that Perfetto and chrome://tracing open: all workers on one clock, streamed, so that size does not matter.

Clocks differ between machines. Sums arrive, and rounds end, everywhere at once: what is left between two workers' notes of such moments,
on the median, is the difference of their clocks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from paceline.report.files import whole
from paceline.report.follow import Follower
from paceline.report.run import TEXT, Run, said
from paceline.report.series import LAST
from paceline.report.steps import PARTS, places
from paceline.report.worker import step_rows

_TWICE = 64  # steps that a checkpoint holds and a resume may tell again
MOST = 1_000_000  # entries of a trace of which nobody said which steps: about 130 MB


def first_step(run: Run, most: int = MOST) -> int:
    """The step from which on a trace has about as many entries as a viewer opens in reasonable time."""
    return max(0, run.last_step + 1 - most // (len(PARTS) * max(1, run.size)))


def entries(run: Run, first: int = 0, last: int = LAST) -> Iterator[dict[str, Any]]:
    """The entries of the trace; `run` has been read before, for clocks and names.

    Args:
        run: whose.
        first: the first step to tell of.
        last: the last.
    """
    offsets, origin = run.offsets(), run.origin
    for rank, worker in sorted(run.workers.items()):
        name = {"name": f"worker {worker.name}"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": name}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    look = places(run, first, last)
    for rank, path in look.files.items():
        shift = offsets.get(rank, 0.0) + origin
        follower = Follower(path, look.begins.get(rank, (-1, 0)))
        kinds = ("steps", "window", *TEXT) if rank == min(look.files) else ("steps", "note", "memory")
        follower.skip = partial(_beyond, kinds, last)
        told: deque[tuple[float, float]] = deque(maxlen=_TWICE)
        for event in follower.new():
            try:
                yield from _of(event, rank, shift, first, last, told)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                continue  # damaged: counted when the run was read


def _beyond(kinds: tuple[str, ...], last: int, kind: str, step: int) -> bool:
    return kind not in kinds or step > last


def _of(
    event: dict[str, Any], rank: int, shift: float, first: int, last: int, told: deque[tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    if event["type"] == "steps":
        for step, at, samples, *phases in step_rows(event):
            if not first <= step <= last or (step, at) in told:
                continue
            told.append((step, at))
            when = at - shift
            for name, took in zip(PARTS, phases, strict=True):
                if took > 0:
                    yield {
                        "ph": "X",
                        "name": "exchange and waiting" if name == "exchange" else name,
                        "cat": "step",
                        "pid": rank,
                        "tid": 0,
                        "ts": round(when * 1e6, 1),
                        "dur": round(took * 1e6, 1),
                        "args": {"step": step, "samples": samples},
                    }
                when += took
    elif event["type"] in TEXT and event.get("changed", True) and first <= int(event.get("step", first)) <= last:
        why = {"step": event.get("step"), "why": said(event)}
        when = round((event["t"] - shift) * 1e6)
        yield {"ph": "i", "s": "g", "name": event["type"], "pid": rank, "tid": 0, "ts": when, "args": why}
    elif event["type"] == "window" and first <= event["step"] <= last:
        when = round((event["t"] - shift) * 1e6)
        counted = {"samples_per_s": event["samples_per_s"], "share of limit": event["efficiency"]}
        for name, value in counted.items():
            if value is not None:
                yield {"ph": "C", "name": name, "pid": 0, "ts": when, "args": {name: value}}


def write(run: Run, path: Path, first: int = 0, last: int = LAST) -> int:
    """Write the trace; whole or not at all.

    Args:
        run: whose.
        path: where to.
        first: the first step to tell of.
        last: the last.

    Returns:
        How many entries it has.
    """
    count = 0
    with whole(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for entry in entries(run, first, last):
            file.write((",\n" if count else "") + json.dumps(entry, separators=(",", ":")))
            count += 1
        file.write("\n]}\n")
    return count
