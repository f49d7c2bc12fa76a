"""The published rule that `dbs`, `dp` and `edp` share, applied once per epoch from that epoch alone.

    p_i  <-  (p_i / t_i) / sum_j (p_j / t_j)

Symbols: p_i the share of worker i (of the *rounded* batch, so that data and batch agree and every worker takes
the same number of steps), t_i its time in the epoch that ended.

What the public code of these papers gets wrong and this does not: rounding that loses samples or gives 0, plans
with unequal step counts (which hang), shards that overlap, a division by n too many, timers that book a
worker's own backward as communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.policies.balance.fit import SHORTEST_S
from paceline.policies.balance.protocol import Weighting
from paceline.policies.balance.shares import split_by_shares
from paceline.types import Decision, Limits, Observation


@dataclass(frozen=True, slots=True)
class RuleState:
    """Shares in force, and what the running epoch has cost each worker so far."""

    shares: tuple[float, ...]
    sum_s: tuple[float, ...]
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class EpochRule:
    """The rule, for a choice of what counts as a worker's time and how gradients are summed.

    Args:
        name: what the method is called.
        weighting: `share` for g = sum (b_i / B) g_i, `mean` for the plain mean.
        clock: `wall` is the whole loop less communication, `compute` forward and backward alone.
    """

    name: str
    weighting: Weighting
    clock: Literal["wall", "compute"]
    per_epoch: bool = True

    def init(self, num_workers: int) -> RuleState:
        """Equal shares for the first epoch."""
        return RuleState(shares=(1.0 / num_workers,) * num_workers, sum_s=(0.0,) * num_workers)

    def update(self, seen: Observation, state: RuleState) -> tuple[Decision, RuleState]:
        """Add the window to the epoch's account; at the epoch's end apply the rule and start a new one."""
        times = seen.wall_s if self.clock == "wall" else seen.compute_s
        total_s = tuple(old + t * seen.num_steps for old, t in zip(state.sum_s, times, strict=True))
        state = RuleState(state.shares, total_s, state.num_steps + seen.num_steps)
        if not seen.ends_epoch:
            return Decision(self.split(seen.total, seen.limits, state), "the epoch's shares hold until it ends"), state
        split = self.split(seen.total, seen.limits, state)
        if all(t >= SHORTEST_S for t in total_s) and all(split):
            rates = tuple(b / t for b, t in zip(split, total_s, strict=True))
            whole = math.fsum(rates)
            state = RuleState(tuple(rate / whole for rate in rates), (0.0,) * len(rates))
            cost = ", ".join(f"{t:.3g}" for t in total_s)
            reason = f"epoch {seen.epoch} cost the workers {cost} s"
        else:
            state = RuleState(state.shares, (0.0,) * len(split))
            reason = f"epoch {seen.epoch} was not timed on every worker: shares kept"
        return Decision(self.split(seen.total, seen.limits, state), reason), state

    def split(self, total: int, limits: Limits, state: RuleState) -> tuple[int, ...]:
        """Shares to whole batches by largest remainder."""
        return split_by_shares(state.shares, total, limits)

    def predict_s(self, split: tuple[int, ...], state: RuleState) -> None:
        """The rule has no model of time."""
        return None
