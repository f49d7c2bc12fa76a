"""What a batch policy is: it sees how much the gradients of parts of a batch differ, and says how large the batch should be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from paceline.errors import ConfigError

S = TypeVar("S")
Needs = Literal["nothing", "norms", "inner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Gradients of M parts of one global batch, all at the same parameters; the same numbers on every worker.

    Args:
        step: the step they belong to.
        total: the global batch in force, which the next decision changes.
        most: the largest batch that data and memory allow.
        first: the batch the run began with.
        sizes: samples b_m of each part; parts without samples are left out.
        squares: ||g_m||^2, with g_m the mean gradient over part m.
        joint: ||g||^2, with g = sum_m b_m g_m / sum_m b_m.
        inner: <g_m, g>; empty unless the policy asks for it.
        fixed: what a step costs before its first sample, in samples; None while unknown.
    """

    step: int
    total: int
    most: int
    first: int = 1
    sizes: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()
    joint: float = math.nan
    inner: tuple[float, ...] = ()
    fixed: float | None = None

    @property
    def finite(self) -> bool:
        """Whether all numbers are."""
        return math.isfinite(self.joint) and all(map(math.isfinite, (*self.squares, *self.inner)))

    @property
    def samples(self) -> float:
        """In all parts."""
        return math.fsum(self.sizes)


@dataclass(frozen=True, slots=True)
class Size:
    """How large the batch should be, and why.

    Args:
        total: the global batch.
        reason: one sentence for people; empty where nothing was decided.
        noise: the gradient noise scale as far as known, in samples.
        warning: something the user should hear once.
    """

    total: int
    reason: str = ""
    noise: float | None = None
    warning: str = ""


class Batch(Protocol[S]):
    """How large is the global batch? A frozen dataclass of settings, with a state of plain numbers."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    @property
    def needs(self) -> Needs:
        """What must be measured for it."""
        ...

    @property
    def at(self) -> Literal["first", "last"]:
        """Which step of a round of local training it looks at."""
        ...

    def init(self) -> S:
        """State before anything was seen."""
        ...

    def planned(self, step: int, samples: int) -> int | None:
        """The batch of a step, if it is known in advance; None if it hangs on what is seen."""
        ...

    def update(self, seen: Gradients, state: S) -> tuple[Size, S]:
        """Learn from a step's gradients and decide the batch from now on."""
        ...


AnyBatch = Batch[Any]


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_share(name: str, value: Any, meaning: str) -> None:
    """A number strictly between 0 and 1, or a ConfigError that says what else it would mean."""
    if not is_number(value) or not 0 < value < 1:
        raise ConfigError(f"{name} must lie between 0 and 1, both left out; got {value!r}. {meaning}")
