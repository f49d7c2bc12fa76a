"""The figures of a run as plain values, ready to be drawn: what is on the page is what is in here, and in the events.

A chart is `{"id", "title", "text", "kind", "x", "y", ...}`. `text` says in words what is to be seen, for those who do not look.
"""

from __future__ import annotations

from typing import Any

from paceline.report.run import PHASES, Run
from paceline.report.series import Series

POINTS = 400  # of a line: more than a screen shows
MANY = 8  # workers; beyond that lines are drawn as a map


def thinned(series: Series, column: int, points: int = POINTS) -> tuple[list[int], list[float | None]]:
    """Steps and means of a column, neighbours joined until no more than `points` are left."""
    steps, values = series.steps, series.means(column)
    group = -(-len(steps) // points) if steps else 1
    if group <= 1:
        return steps, values
    xs, ys = [], []
    for begin in range(0, len(steps), group):
        there = [value for value in values[begin : begin + group] if value is not None]
        xs.append(steps[begin])
        ys.append(sum(there) / len(there) if there else None)
    return xs, ys


def charts(run: Run, found: dict[str, Any]) -> list[dict[str, Any]]:
    """All charts of a run, with its figures, that have something to show."""
    if run.problem:
        return []
    made = [
        _speed(run),
        _lanes(run, found),
        _phases(found),
        _step_time(run),
        _efficiency(run),
        _splits(run),
        _batch(run),
        _losses(run),
        _rounds(run),
        _bytes(run),
        _drift(run),
        _zeta(run),
    ]
    return [chart for chart in made if chart is not None]


def _line(name: str, x: list[Any], y: list[Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "x": x, "y": y, **more}


def _curves(
    id_: str, title: str, text: str, y_title: str, lines: list[dict[str, Any]], x_title: str = "step"
) -> dict[str, Any]:
    return {
        "id": id_,
        "title": title,
        "text": text,
        "kind": "lines",
        "x_title": x_title,
        "y_title": y_title,
        "lines": lines,
    }


def _rates(run: Run) -> tuple[list[int], list[float | None], list[float | None], list[float | None]]:
    """Steps; samples/s; what the workers make by themselves; seconds a step takes."""
    steps, batch = thinned(run.windows, 0)
    took, able = thinned(run.windows, 1)[1], thinned(run.windows, 2)[1]
    return steps, _over(batch, took), _over(able, took), took


def _over(parts: list[float | None], wholes: list[float | None]) -> list[float | None]:
    return [None if a is None or not b else a / b for a, b in zip(parts, wholes, strict=True)]


def _efficiency(run: Run) -> dict[str, Any] | None:
    if not len(run.windows):
        return None
    steps, rate, able, _ = _rates(run)
    share = [None if one is None else 100 * one for one in _over(rate, able)]
    last = next((value for value in reversed(share) if value is not None), None)
    if last is None:
        return None
    return _curves(
        "efficiency",
        "Efficiency: share of what the workers make by themselves",
        f"Per cent over steps; {last:.0f} at the end.",
        "%",
        [_line("share of the limit", steps, share)],
    )


def _speed(run: Run) -> dict[str, Any] | None:
    if not len(run.windows):
        return None
    steps, rate, able, _ = _rates(run)
    last = next((value for value in reversed(rate) if value is not None), 0.0)
    return _curves(
        "speed",
        "Samples per second, and what the workers make by themselves",
        f"Samples per second over steps; {last:.0f} at the end.",
        "samples/s",
        [_line("all together", steps, rate), _line("limit: workers by themselves", steps, able, dash="dot")],
    )


def _lanes(run: Run, found: dict[str, Any]) -> dict[str, Any] | None:
    """Who waits when: a row a worker."""
    if run.waits is None or not len(run.waits):
        return None
    steps: list[int] = []
    rows = []
    took = thinned(run.waits, run.waits.columns - 1)[1]
    for rank in range(run.waits.columns - 1):
        steps, waits = thinned(run.waits, rank)
        rows.append([None if one is None else 100 * one for one in _over(waits, took)])
    idle = max((one["idle_share"] or 0.0, -one["worker"]) for one in found["workers"])
    return {
        "id": "lanes",
        "title": "Who waits, and when: share of each step spent waiting for others",
        "text": f"A row a worker. Worker {-idle[1]} waits most: {idle[0]:.0%} of its time.",
        "kind": "map",
        "x_title": "step",
        "y_title": "worker",
        "x": steps,
        "y": [f"worker {rank}" for rank in range(len(rows))],
        "z": rows,
        "unit": "%",
    }


def _phases(found: dict[str, Any]) -> dict[str, Any] | None:
    """Where the time of a step goes."""
    workers = [one for one in found["workers"] if one["compute_s"] is not None]
    if not workers:
        return None
    names = [f"worker {one['worker']}" for one in workers]
    return {
        "id": "phases",
        "title": "Where the time of a step goes",
        "text": "Milliseconds of a step in each phase, a bar a worker; the table below has the numbers.",
        "kind": "bars",
        "x_title": "ms a step",
        "y_title": "",
        "lines": [
            _line(phase, [None if one[f"{phase}_s"] is None else one[f"{phase}_s"] * 1e3 for one in workers], names)
            for phase in PHASES
        ],
    }


def _step_time(run: Run) -> dict[str, Any] | None:
    if not len(run.windows):
        return None
    steps, batch = thinned(run.windows, 0)
    took = thinned(run.windows, 1)[1]
    best = _over(batch, _rates(run)[2])
    return _curves(
        "step-time",
        "Time of a step against the optimum",
        "Milliseconds a step takes, and would take if nobody waited and exchanges were free.",
        "ms",
        [_line("step", steps, _ms(took)), _line("optimum", steps, _ms(best), dash="dot")],
    )


def _splits(run: Run) -> dict[str, Any] | None:
    if run.splits is None or not len(run.splits):
        return None
    columns = min(run.size, run.splits.columns)
    if columns > MANY:
        rows = [thinned(run.splits, rank)[1] for rank in range(columns)]
        return {
            "id": "split",
            "title": "Samples of each worker",
            "text": f"Samples per step of {columns} workers over steps, a row a worker.",
            "kind": "map",
            "x_title": "step",
            "y_title": "worker",
            "x": thinned(run.splits, 0)[0],
            "y": [f"worker {rank}" for rank in range(columns)],
            "z": rows,
            "unit": "",
        }
    return _curves(
        "split",
        "Samples of each worker",
        f"Samples per step; now {', '.join(map(str, run.split))}.",
        "samples",
        [_line(f"worker {rank}", *thinned(run.splits, rank)) for rank in range(columns)],
    )


def _batch(run: Run) -> dict[str, Any] | None:
    totals = [value for value in run.batches.means(0) if value is not None]
    if len(set(totals)) < 2:
        return None
    steps, total = thinned(run.batches, 0)
    _, noise = thinned(run.batches, 1)
    return _curves(
        "batch",
        "Global batch and noise scale",
        f"The batch went from {totals[0]:.0f} to {totals[-1]:.0f} samples.",
        "samples",
        [_line("batch", steps, total), _line("noise scale", steps, noise, dash="dot")],
    )


def _losses(run: Run) -> dict[str, Any] | None:
    found = [(epoch, total / count) for epoch, (total, count, *_) in sorted(run.losses.items()) if count]
    if not found:
        return None
    group = -(-len(found) // POINTS)
    found = found[::group]
    return _curves(
        "loss",
        "Mean loss of each epoch",
        f"From {found[0][1]:.4g} to {found[-1][1]:.4g}.",
        "loss",
        [_line("loss", [epoch for epoch, _ in found], [loss for _, loss in found])],
        x_title="epoch",
    )


def _rounds(run: Run) -> dict[str, Any] | None:
    if not len(run.rounds):
        return None
    steps, transfer = thinned(run.rounds, 0)
    _, waited = thinned(run.rounds, 1)
    return _curves(
        "rounds",
        "Exchanges of replicas: how long, and how long they were waited for",
        f"{run.num_rounds} exchanges.",
        "ms",
        [_line("transfer", steps, _ms(transfer)), _line("waited", steps, _ms(waited))],
    )


def _bytes(run: Run) -> dict[str, Any] | None:
    if not run.round_bytes:
        return None
    steps, sent = thinned(run.sent, 0)
    return _curves(
        "bytes",
        "Bytes that a worker sends in an exchange",
        f"Megabytes, mean over workers; {run.round_bytes / 1e6:.1f} MB in all.",
        "MB",
        [_line("sent", steps, [None if one is None else one / 1e6 for one in sent])],
    )


def _drift(run: Run) -> dict[str, Any] | None:
    steps, drift = thinned(run.rounds, 2)
    if not any(value is not None for value in drift):
        return None
    return _curves(
        "drift",
        "Drift: how far replicas went apart between exchanges",
        "0 is together; above 1 they pull against each other.",
        "drift",
        [_line("drift", steps, drift)],
    )


def _zeta(run: Run) -> dict[str, Any] | None:
    if not len(run.zeta):
        return None
    steps, ratio = thinned(run.zeta, 0)
    return _curves(
        "partition",
        "Partition: dissimilarity of the shards' gradients, in squared gradients",
        "0 is alike.",
        "ratio",
        [_line("dissimilarity", steps, ratio)],
    )


def _ms(values: list[float | None]) -> list[float | None]:
    return [None if value is None else value * 1e3 for value in values]
