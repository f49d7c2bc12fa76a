"""`inner-product`: grow until the gradient surely points downhill (Bollapragada, Byrd and Nocedal 2018).

    Var_i(<g_i, g>) / B <= theta^2 ||g||^4

The variance over samples comes from that over parts: sum_m b_m (<g_m, g> - ||g||^2)^2 / (M - 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.errors import ConfigError
from paceline.policies.batch.noise import Averages, passed_over
from paceline.policies.batch.protocol import Gradients, Needs, Size, is_number

_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class InnerProduct:
    """The test along the gradient.

    Args:
        theta: how much of the step along the gradient its noise may be; 0.9 as published.
    """

    theta: float = 0.9

    name = "inner-product"
    needs: ClassVar[Needs] = "inner"
    at: ClassVar[Literal["first", "last"]] = "first"

    def __post_init__(self) -> None:
        check_positive("theta", self.theta)

    def init(self) -> Averages:
        """Nothing seen."""
        return Averages()

    def planned(self, step: int, samples: int) -> int | None:
        """It hangs on the gradients."""
        return None

    def wanted(self, seen: Gradients) -> tuple[float, str]:
        """The batch asked for, and why."""
        needed = over(along(seen), self.theta**2 * seen.joint**2, seen)
        return needed, f"along the gradient the variance asks for {math.ceil(needed)} samples at theta={self.theta:g}"

    def update(self, seen: Gradients, state: Averages) -> tuple[Size, Averages]:
        """Test one step."""
        nothing = passed_over(seen, state)
        if nothing is not None or seen.joint <= 0:
            return nothing or (Size(seen.total), state)
        state = state.add(seen, _DECAY)
        needed, reason = self.wanted(seen)
        if needed <= seen.total:
            return Size(seen.total, noise=state.noise), state
        return Size(math.ceil(needed), reason, state.noise), state


def over(variance: float, allowed: float, seen: Gradients) -> float:
    """The batch at which the variance is as small as is allowed; no more than there are samples."""
    return float(seen.most) if variance >= allowed * seen.most else variance / allowed


def along(seen: Gradients) -> float:
    """The variance of single samples' gradients along the mean, times ||g||^2."""
    far = (b * (inner - seen.joint) ** 2 for b, inner in zip(seen.sizes, seen.inner, strict=True))
    return math.fsum(far) / (len(seen.sizes) - 1)


def across(seen: Gradients) -> float:
    """The variance of single samples' gradients in all other directions."""
    parts = zip(seen.sizes, seen.squares, seen.inner, strict=True)
    return math.fsum(b * (square - inner**2 / seen.joint) for b, square, inner in parts) / (len(seen.sizes) - 1)


def check_positive(name: str, value: Any) -> None:
    """A positive number, or a ConfigError."""
    if not is_number(value) or not value > 0:
        raise ConfigError(f"{name} must be a positive number: the noise that is borne; got {value!r}")
