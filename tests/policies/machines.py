"""Workers with known times, for policies to be tried on without a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.types import Limits, Observation


@dataclass(frozen=True)
class Machines:
    fixed: tuple[float, ...]
    slope: tuple[float, ...]

    def times(self, split: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(c + a * b for c, a, b in zip(self.fixed, self.slope, split, strict=True))


def seen(
    split: tuple[int, ...], times: tuple[float, ...], limits: Limits, step: int = 0, **changes: Any
) -> Observation:
    values: dict[str, Any] = {
        "step": step,
        "epoch": step,
        "ends_epoch": True,
        "total": sum(split),
        "limits": limits,
        "samples": tuple(float(b) for b in split),
        "busy_s": times,
        "noise_s": (0.0,) * len(split),
        "wall_s": times,
        "compute_s": times,
    }
    return Observation(**{**values, **changes})


def plans(
    policy: Any, machines: Machines, total: int, count: int, limits: Limits | None = None
) -> list[tuple[int, ...]]:
    """The splits a policy uses, one window each."""
    limits = limits or Limits.of(len(machines.fixed))
    state = policy.init(len(machines.fixed))
    used = [policy.split(total, limits, state)]
    for step in range(count - 1):
        decision, state = policy.update(seen(used[-1], machines.times(used[-1]), limits, step), state)
        assert decision.split == policy.split(total, limits, state)
        used.append(decision.split)
    return used
