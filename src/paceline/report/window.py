"""A window of steps over all workers, as a `window` event tells of it; nothing in it is trusted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from paceline.report.follow import MOST_WORKERS

_SLACK_S, _LONGEST_S = 1e-3, 1e9  # what differences of clocks may be below 0; what no step takes


class Window(NamedTuple):
    """A window of steps, over all workers; what does not make sense has been refused.

    Args:
        samples_per_s: of all together.
        limit: samples/s that the workers make by themselves; None if nobody knows.
        step_s: how long a step takes.
        exchange_s: of that, the exchange that nobody computes behind.
        waiting_s: how long each worker waits for slower ones.
        samples: of each worker.
        busy_s: how long each worker works.
        num_steps: steps in it.
    """

    samples_per_s: float
    limit: float | None
    step_s: float
    exchange_s: float
    waiting_s: list[float]
    samples: list[float]
    busy_s: list[float]
    num_steps: int

    @classmethod
    def of(cls, event: dict[str, Any]) -> Window | None:
        """What a `window` event says; None if it says nothing.

        Raises:
            ValueError: it makes no sense.
        """
        if event["samples_per_s"] is None:
            return None
        seen = event["observation"]
        rate, efficiency = float(event["samples_per_s"]), event.get("efficiency")
        took, comm = _numbers(event["step_s"]), _numbers(event["comm_s"])
        if "waiting_s" in event:
            step_s, exchange, waiting = sum(took) / len(took), float(event["exchange_s"]), _numbers(event["waiting_s"])
        else:  # files from before: means over the window, which is not the same when workers take turns
            step_s, exchange = max(took), min(comm)
            waiting = [one - exchange for one in comm]
        samples, busy = _numbers(seen["samples"]), _numbers(seen["busy_s"])
        if len({len(took), len(comm), len(waiting), len(samples), len(busy)}) != 1 or not len(took) <= MOST_WORKERS:
            raise ValueError("lists of different lengths")
        limit = rate / float(efficiency) if efficiency else None
        if not all(math.isfinite(one) for one in (rate, step_s, exchange, limit or 0.0)):
            raise ValueError("no numbers")
        return cls(rate, limit, step_s, exchange, waiting, samples, busy, int(seen.get("num_steps") or 1))


def _numbers(values: Any) -> list[float]:
    found = [0.0 if value is None else float(value) for value in values]
    if not found or not all(-_SLACK_S <= one < _LONGEST_S for one in found):
        raise ValueError("no times or numbers of samples")
    return found
