"""`equal`: the same share for every worker, as DistributedDataParallel gives; the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.policies.balance.protocol import Weighting
from paceline.policies.balance.shares import split_by_shares
from paceline.types import Decision, Limits, Observation


@dataclass(frozen=True, slots=True)
class EqualState:
    """Only how many workers there are."""

    num_workers: int


@dataclass(frozen=True, slots=True)
class Equal:
    """b_i = B / n, rounded so that the sum stays B.

    >>> Equal().split(64, Limits.of(3), Equal().init(3))
    (22, 21, 21)
    """

    name: str = "equal"
    weighting: Weighting = "share"
    per_epoch: bool = False

    def init(self, num_workers: int) -> EqualState:
        """Nothing to learn."""
        return EqualState(num_workers)

    def update(self, seen: Observation, state: EqualState) -> tuple[Decision, EqualState]:
        """The same split, whatever was seen."""
        return Decision(self.split(seen.total, seen.limits, state), "equal shares by choice"), state

    def split(self, total: int, limits: Limits, state: EqualState) -> tuple[int, ...]:
        """Equal shares within the limits."""
        return split_by_shares((1.0,) * state.num_workers, total, limits)

    def predict_s(self, split: tuple[int, ...], state: EqualState) -> None:
        """No model."""
        return None
