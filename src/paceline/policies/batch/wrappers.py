"""Behaviour added around any batch policy: how far, how fast, and from what difference on.

Each wrapper holds another policy and is one itself, so they nest: `Bounds(Hysteresis(Growth(NoiseScale())), most=4096)`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import ConfigError
from paceline.policies.batch.protocol import AnyBatch, Gradients, Needs, Size, is_number


@dataclass(frozen=True, slots=True)
class _Around(ABC):
    """Shared by all wrappers: everything is the inner policy's, but what it asks for is looked at."""

    inner: AnyBatch

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.inner.name

    @property
    def needs(self) -> Needs:
        """What the inner policy needs."""
        return self.inner.needs

    @property
    def at(self) -> Literal["first", "last"]:
        """The inner policy's."""
        return self.inner.at

    def init(self) -> Any:
        """The inner policy's state."""
        return self.inner.init()

    def planned(self, step: int, samples: int) -> int | None:
        """The inner policy's."""
        return self.inner.planned(step, samples)

    def update(self, seen: Gradients, state: Any) -> tuple[Size, Any]:
        """The inner policy's decision, held in."""
        asked, state = self.inner.update(seen, state)
        return (asked if asked.total == seen.total else self.hold(asked, seen)), state

    @abstractmethod
    def hold(self, asked: Size, seen: Gradients) -> Size:
        """What is left of it."""


@dataclass(frozen=True, slots=True)
class Growth(_Around):
    """At most `factor` times as large, or as small, in one decision."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        if not is_number(self.factor) or not self.factor > 1:
            raise ConfigError(f"factor must be a number above 1, or the batch never changes; got {self.factor!r}")

    def hold(self, asked: Size, seen: Gradients) -> Size:
        """Nearer to what there is."""
        low, high = math.ceil(seen.total / self.factor), math.floor(seen.total * self.factor)
        total = min(max(asked.total, low), max(high, seen.total + 1))
        return (
            asked
            if total == asked.total
            else dataclasses.replace(
                asked, total=total, reason=f"{asked.reason}; at most {self.factor:g} times at once: {total}"
            )
        )


@dataclass(frozen=True, slots=True)
class Hysteresis(_Around):
    """Leave small differences alone: grow above `grow` times the batch, shrink below `shrink` times."""

    grow: float = 1.2
    shrink: float = 0.6

    def __post_init__(self) -> None:
        if not is_number(self.shrink) or not is_number(self.grow) or not 0 <= self.shrink < 1 <= self.grow:
            raise ConfigError(f"shrink must be below 1 and grow at least 1; got {self.shrink!r} and {self.grow!r}")

    def hold(self, asked: Size, seen: Gradients) -> Size:
        """The batch as it is, if the difference is small."""
        if self.shrink * seen.total <= asked.total <= self.grow * seen.total:
            return dataclasses.replace(asked, total=seen.total, reason="")
        return asked


@dataclass(frozen=True, slots=True)
class Bounds(_Around):
    """Between `least` and `most`, and within what data and memory allow.

    Args:
        inner: the policy that asks.
        least: smallest batch; None is the one the run began with, which the learning rate was chosen for. Near the start noise scales
            are close to 0, and a batch that follows them there makes steps too noisy for that rate.
        most: largest batch.
    """

    least: int | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("least", self.least), ("most", self.most)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number of samples, at least 1; got {value!r}")
        if self.most is not None and self.least is not None and self.least > self.most:
            raise ConfigError(f"least must not exceed most: got {self.least} and {self.most}")

    def hold(self, asked: Size, seen: Gradients) -> Size:
        """The nearest batch within the bounds."""
        high, why = seen.most, "data and memory leave room for"
        if self.most is not None and self.most <= high:
            high, why = self.most, "most is"
        if asked.total > high:
            return self._cut(asked, seen, high, f"{why} {high}")
        least = min(seen.first if self.least is None else self.least, seen.total)  # never grow because of it
        if asked.total < least:
            return self._cut(asked, seen, min(least, high), f"least is {least}")
        return asked

    def _cut(self, asked: Size, seen: Gradients, total: int, why: str) -> Size:
        reason = f"{asked.reason}; {why}" if total != seen.total else ""
        return dataclasses.replace(asked, total=total, reason=reason)
