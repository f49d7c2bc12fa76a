"""Run folders made by hand: as many workers and steps as a test wants, with events as the runtime writes them."""

from __future__ import annotations

from pathlib import Path

from paceline.events import SCHEMA, EventLog, events_path
from paceline.policies.balance import policy
from paceline.types import Limits, Observation


def start(rank, size, sync="allreduce", host="here", **more):
    config = {"balance": "equal", "sync": sync, "batch": "constant", "lr_rule": "none", "seed": 0, "recipe": None}
    return {
        "schema": SCHEMA,
        "rank": rank,
        "size": size,
        "host": host,
        "pid": 1,
        "device": "cpu",
        "config": config,
        **more,
    }


def window(step, split, busy, exchange=0.01):
    """What the coordinator writes about a window: the slowest waits for the exchange alone."""
    slowest = max(busy)
    comm = [slowest - one + exchange for one in busy]
    rate = sum(split) / (slowest + exchange)
    able = sum(b / t for b, t in zip(split, busy, strict=True))
    return {
        "step": step,
        "epoch": 0,
        "observation": {
            "step": step,
            "samples": list(map(float, split)),
            "busy_s": busy,
            "noise_s": [0.0] * len(split),
            "num_steps": 4,
        },
        "step_s": [slowest + exchange] * len(split),
        "comm_s": comm,
        "exchange_s": exchange,
        "waiting_s": [slowest - one for one in busy],
        "samples_per_s": rate,
        "efficiency": rate / able,
    }


def steps(first, count, samples, data, compute, comm, optimizer, at):
    """`count` steps of one worker that follow each other; the first begins at `at`."""
    whole = data + compute + comm + optimizer
    return {
        "step": list(range(first, first + count)),
        "at": [at + place * whole for place in range(count)],
        "samples": [samples] * count,
        "data_wait_s": [data] * count,
        "compute_s": [compute] * count,
        "comm_s": [comm] * count,
        "optimizer_s": [optimizer] * count,
    }


def write_run(
    folder: Path,
    split,
    busy,
    *,
    num_steps=40,
    every=4,
    exchange=0.01,
    ends=True,
    clocks=None,
    leave_out=(),
    name="here",
) -> Path:
    """A run of workers that always take `busy` seconds for `split` samples, with clocks that are so many seconds ahead."""
    size, slowest = len(split), max(busy)
    for rank in range(size):
        if rank in leave_out:
            continue
        ahead = clocks[rank] if clocks else 0.0
        now = [1000.0]
        log = EventLog(events_path(folder, rank), clock=lambda now=now, ahead=ahead: now[0] + ahead)
        log.write("start", **start(rank, size, host=name))
        log.write("data", length=1000, batch_size=sum(split), steps_per_epoch=10)
        log.write("plan", step=0, start=0, split=split, changed=True, reason="first plan", predicted_s=None, digest=1)
        took = slowest + exchange
        for first in range(0, num_steps, every):
            at = now[0] + ahead
            now[0] += every * took
            comm = slowest - busy[rank] + exchange
            log.write("steps", **steps(first, every, split[rank], 0.002, busy[rank] - 0.003, comm, 0.001, at))
            log.write("window", **window(first + every - 1, split, busy, exchange))
            if first % (1000 * every) == 0:
                log.flush()  # faster than a disk otherwise
        log.write("loss", epoch=0, step=num_steps, loss=2.0 - rank, samples=split[rank])
        if ends:
            log.write("end", step=num_steps, ok=True, dropped=0)
        log.close()
    return folder


def simulate(folder: Path, fixed, slope, total, *, name="affine", num_windows=12, every=4, exchange=0.01):
    """A run that never ran: workers of known lines, a real policy, and a clock that begins at 0; seconds it took, and its last split."""
    size, now = len(fixed), [0.0]
    logs = [EventLog(events_path(folder, rank), clock=lambda: now[0]) for rank in range(size)]
    chosen, limits = policy(name), Limits.of(size)
    state = chosen.init(size)
    split = chosen.split(total, limits, state)
    for rank, log in enumerate(logs):
        log.write("start", **start(rank, size, host="simulated"))
        log.write("plan", step=0, start=0, split=split, changed=True, reason="first plan", predicted_s=None, digest=1)
    for number in range(num_windows):
        first, at = number * every, now[0]
        busy = [c + a * b for c, a, b in zip(fixed, slope, split, strict=True)]
        now[0] += every * (max(busy) + exchange)
        times, samples = tuple(busy), tuple(map(float, split))
        seen = Observation(first + every - 1, 0, False, total, limits, samples, times, (0.0,) * size, times, times)
        decision, state = chosen.update(seen, state)
        for rank, log in enumerate(logs):
            comm = max(busy) - busy[rank] + exchange
            log.write("steps", **steps(first, every, split[rank], 0.0, busy[rank], comm, 0.0, at))
            log.write("window", **window(first + every - 1, split, busy, exchange))
            plan = {"split": decision.split, "changed": decision.split != split, "reason": decision.reason}
            log.write("plan", step=first + every - 1, start=first + every, predicted_s=None, digest=1, **plan)
        split = decision.split
    for log in logs:
        log.write("end", step=num_windows * every, ok=True, dropped=0)
        log.close()
    return now[0], split
