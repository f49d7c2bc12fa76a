"""How many steps between two exchanges? H fixed, by the learning rate (QSR), or by what they cost.

| rule | H |
|---|---|
| `Fixed(h)` | h |
| `QSR(base, alpha)` | max(base, floor((alpha / lr)^2)): fewer exchanges as the learning rate falls (Gu et al. 2023) |
| `Hide(least, most, margin)` | the smallest H whose steps hide the transfer: H * t_step >= margin * t_transfer |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import ConfigError
from paceline.policies.sync.protocol import Moment, SyncState, check_whole


class Steps(Protocol):
    """A rule for H."""

    def first(self) -> int:
        """H before anything is known."""
        ...

    def next(self, seen: Moment, now: int) -> tuple[int, str]:
        """H of the round that begins, and why; `now` is that of the round that ends, before any guard."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same.

    Args:
        h: steps between exchanges.
    """

    h: int

    def __post_init__(self) -> None:
        check_whole(
            "H", self.h, 1, ". H=1 exchanges after every step; for no exchange at all train one model per machine"
        )

    def first(self) -> int:
        """H."""
        return self.h

    def next(self, seen: Moment, now: int) -> tuple[int, str]:
        """H."""
        return self.h, ""


@dataclass(frozen=True, slots=True)
class QSR:
    """The quadratic synchronization rule of Gu et al. 2023 (arXiv 2310.14423).

    Args:
        base: least H.
        alpha: the learning rate at which H would be 1.
        most: largest H.
    """

    base: int = 4
    alpha: float = 0.2
    most: int = 1024

    def __post_init__(self) -> None:
        check_whole("base", self.base, 1)
        check_whole("most", self.most, self.base)
        if not self.alpha > 0:
            raise ConfigError(f"alpha must be positive; got {self.alpha!r}")

    def first(self) -> int:
        """The least."""
        return self.base

    def next(self, seen: Moment, now: int) -> tuple[int, str]:
        """From the learning rate."""
        asked = (self.alpha / seen.lr) ** 2 if seen.lr > 0 else self.most
        h = max(self.base, math.floor(min(asked, self.most)))
        return h, f"(alpha {self.alpha:g} / lr {seen.lr:g})^2 asks for H={h}"


@dataclass(frozen=True, slots=True)
class Hide:
    """The smallest H that hides the measured transfer behind measured steps.

    Args:
        least: smallest H.
        most: largest H.
        margin: hide this many times the transfer.
        start: H until something is measured.
    """

    least: int = 1
    most: int = 64
    margin: float = 1.2
    start: int = 4

    def __post_init__(self) -> None:
        check_whole("least", self.least, 1)
        check_whole("most", self.most, self.least)
        check_whole("start", self.start, 1)
        if not self.margin >= 1:
            raise ConfigError(f"margin must be at least 1, or the transfer is not hidden; got {self.margin!r}")

    def first(self) -> int:
        """A guess."""
        return min(self.most, max(self.least, self.start))

    def next(self, seen: Moment, now: int) -> tuple[int, str]:
        """From the newest round; a little less transfer does not make H smaller, so that it does not swing."""
        if seen.round is None or not seen.round.step_s > 0 or not seen.round.transfer_s > 0:
            return now, ""
        ratio = seen.round.transfer_s / seen.round.step_s
        h = min(self.most, max(self.least, math.ceil(self.margin * ratio)))
        if h == now - 1:
            h = now
        return (
            h,
            f"a transfer takes {1e3 * seen.round.transfer_s:.0f} ms, a step {1e3 * seen.round.step_s:.0f} ms: H={h}",
        )


def guarded(h: int, seen: Moment, state: SyncState, limit: float) -> tuple[int, int, str]:
    """The drift guard: halve H while replicas pull apart by more than `limit`, and give it back when they stop.

    Returns:
        H, the divisor from now on, and a reason where it changed.
    """
    shrink, reason = state.shrink, ""
    if seen.round is not None and limit > 0:
        if seen.round.drift > limit and h // shrink > 1:
            shrink *= 2
            reason = f"drift {seen.round.drift:.2g} is over {limit:g}: H is divided by {shrink}"
        elif seen.round.drift < limit / 4 and shrink > 1:
            shrink //= 2
            reason = f"drift {seen.round.drift:.2g} is well under {limit:g}: H is divided by {shrink}"
    return max(1, h // shrink), shrink, reason
