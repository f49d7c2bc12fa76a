"""`fixed`: shares set by hand. What people do today with an `if` on the rank, made exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.policies.balance.equal import EqualState
from paceline.policies.balance.protocol import Weighting
from paceline.policies.balance.shares import split_by_shares
from paceline.types import Decision, Limits, Observation


@dataclass(frozen=True, slots=True)
class Fixed:
    """b_i = B * w_i / sum_j w_j, rounded so that the sum stays B.

    Args:
        shares: one positive weight per worker; only their ratios matter.

    >>> Fixed((1, 3)).split(64, Limits.of(2), Fixed((1, 3)).init(2))
    (16, 48)
    """

    shares: tuple[float, ...]
    name: str = "fixed"
    weighting: Weighting = "share"
    per_epoch: bool = False

    def __post_init__(self) -> None:
        for share in self.shares:
            if not (share > 0 and math.isfinite(share)):
                raise ConfigError(f"fixed shares must be positive numbers, got {share}")

    def init(self, num_workers: int) -> EqualState:
        """Nothing to learn; the number of shares must match."""
        if len(self.shares) != num_workers:
            raise ConfigError(f"fixed needs one share per worker: got {len(self.shares)} for {num_workers} workers")
        return EqualState(num_workers)

    def update(self, seen: Observation, state: EqualState) -> tuple[Decision, EqualState]:
        """The same split, whatever was seen."""
        return Decision(self.split(seen.total, seen.limits, state), "shares set by hand"), state

    def split(self, total: int, limits: Limits, state: EqualState) -> tuple[int, ...]:
        """The given shares within the limits."""
        return split_by_shares(tuple(float(share) for share in self.shares), total, limits)

    def predict_s(self, split: tuple[int, ...], state: EqualState) -> None:
        """No model."""
        return None
