"""`schedule`: batches written down beforehand, by steps or by samples (Smith et al. 2018: grow the batch instead of shrinking
the learning rate)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.policies.batch.protocol import Gradients, Needs, Size


@dataclass(frozen=True, slots=True)
class Schedule:
    """A list of (from when, batch).

    Args:
        points: begins and batches, in order, the first from 0 on.
        unit: what begins are counted in.
    """

    points: tuple[tuple[int, int], ...]
    unit: Literal["steps", "samples"] = "samples"

    name = "schedule"
    needs: ClassVar[Needs] = "nothing"
    at: ClassVar[Literal["first", "last"]] = "first"

    def __post_init__(self) -> None:
        if self.unit not in ("steps", "samples"):
            raise ConfigError(f"unit must be 'steps' or 'samples'; got {self.unit!r}")
        if not self.points or self.points[0][0] != 0:
            raise ConfigError(f"a schedule begins at 0, as in ((0, 256), (50000, 512)); got {self.points!r}")
        if any(batch < 1 or begin < 0 for begin, batch in self.points):
            raise ConfigError(f"batches must be at least 1 sample and begin at 0 or later; got {self.points!r}")
        if any(b <= a for (a, _), (b, _) in pairwise(self.points)):
            raise ConfigError(f"a schedule's beginnings must rise; got {self.points!r}")

    def init(self) -> tuple[()]:
        """There is no state."""
        return ()

    def planned(self, step: int, samples: int) -> int | None:
        """The last point that has begun.

        >>> Schedule(((0, 256), (1000, 512))).planned(3, 1000)
        512
        """
        now = step if self.unit == "steps" else samples
        return next(batch for begin, batch in reversed(self.points) if begin <= now)

    def update(self, seen: Gradients, state: tuple[()]) -> tuple[Size, tuple[()]]:
        """Nothing to learn."""
        return Size(seen.total), state
