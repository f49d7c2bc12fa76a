"""Plans and the step from which each holds.

Batches are cut ahead of time when loader processes prefetch, so a plan decided now can only hold from a later step. Every
worker keeps the same book and cuts a step's batch by the newest plan that had started by then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from paceline.policies.balance import AnyBalance
from paceline.types import Limits


@dataclass(frozen=True)
class Plan:
    """A policy with the knowledge it had when the plan was made.

    Args:
        start: first step it holds for.
        policy: who divides.
        state: what it knew.
        limits: the bounds it keeps.
        total: the global batch.
    """

    start: int
    policy: AnyBalance
    state: Any
    limits: Limits
    total: int
    _cuts: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    def cut(self, total: int) -> tuple[int, ...]:
        """The split of a global batch of `total` samples."""
        if total not in self._cuts:
            self._cuts[total] = self.policy.split(total, self.limits, self.state)
        return self._cuts[total]

    def weights(self, split: tuple[int, ...]) -> tuple[float, ...]:
        """What each worker's gradient counts in the sum; they sum to 1."""
        if self.policy.weighting == "mean":
            active = sum(1 for samples in split if samples)
            return tuple(1.0 / active if samples else 0.0 for samples in split)
        total = sum(split)
        return tuple(samples / total for samples in split)


class PlanBook:
    """All plans that can still be asked for.

    Args:
        first: the plan for the first step.
    """

    def __init__(self, first: Plan) -> None:
        self.plans = [first]

    @property
    def latest(self) -> Plan:
        """The newest plan, in force or about to be."""
        return self.plans[-1]

    def add(self, plan: Plan) -> None:
        """A plan for the steps from its start on; replaces one that has not started before it."""
        assert plan.start >= self.plans[0].start, (plan.start, self.plans[0].start)
        self.plans = [old for old in self.plans if old.start < plan.start] + [plan]

    def at(self, step: int) -> Plan:
        """The plan that holds for `step`."""
        for plan in reversed(self.plans):
            if plan.start <= step:
                return plan
        raise AssertionError(f"no plan for step {step}: the oldest starts at {self.plans[0].start}")

    def begin(self, step: int) -> None:
        """Nothing from `step` on is cut yet: the newest plan holds from there at the latest."""
        latest = self.latest
        if latest.start > step:
            self.add(dataclasses.replace(latest, start=step))

    def forget(self, step: int) -> None:
        """Steps before `step` will not be asked for again."""
        keep = self.at(step)
        self.plans = [plan for plan in self.plans if plan.start >= keep.start]

    def digest(self, total: int) -> int:
        """A number below 2^48 that two workers share exactly if they hold the same newest plan."""
        text = json.dumps([self.latest.start, self.latest.cut(total), self.latest.policy.name])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
