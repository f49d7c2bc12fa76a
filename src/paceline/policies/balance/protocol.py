"""What a balance policy is."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

from paceline.types import Decision, Limits, Observation

S = TypeVar("S")
Weighting = Literal["share", "mean"]


class Balance(Protocol[S]):
    """How much of each global batch does each worker take?

    A policy is a frozen dataclass of settings. Its state is a frozen dataclass of plain numbers, so a
    checkpoint, a log and a replay need nothing else.
    """

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    @property
    def weighting(self) -> Weighting:
        """How gradients are summed: `share` (b_i / B, exact) or `mean` (1 / n, as `dp` prints it)."""
        ...

    @property
    def per_epoch(self) -> bool:
        """Whether it decides at the end of epochs; others see full windows only."""
        ...

    def init(self, num_workers: int) -> S:
        """State before anything was seen."""
        ...

    def update(self, seen: Observation, state: S) -> tuple[Decision, S]:
        """Learn from a window of steps and decide the split from now on."""
        ...

    def split(self, total: int, limits: Limits, state: S) -> tuple[int, ...]:
        """The split of any total (the short last batch, say) under what `state` knows."""
        ...

    def predict_s(self, split: tuple[int, ...], state: S) -> tuple[float, float] | None:
        """Time of the slowest worker under `split`, and its standard error; None without a model."""
        ...


AnyBalance = Balance[Any]
