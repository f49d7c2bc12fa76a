"""`noise-scale`: keep the batch at c times the gradient noise scale (McCandlish et al. 2018), up and down.

At B = Bn a step is half as good as one with an infinite batch, and costs twice the samples of many small ones: c = 1 is the knee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.policies.batch.inner_product import check_positive
from paceline.policies.batch.noise import Averages, passed_over
from paceline.policies.batch.protocol import Gradients, Needs, Size, is_number


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """Follow the noise scale.

    Args:
        c: the batch, in noise scales.
        decay: of the running means of its numerator and denominator, per observation.
        patience: observations before the first decision.
    """

    c: float = 1.0
    decay: float = 0.95
    patience: int = 10

    name = "noise-scale"
    needs: ClassVar[Needs] = "norms"
    at: ClassVar[Literal["first", "last"]] = "first"

    def __post_init__(self) -> None:
        check_positive("c", self.c)
        if not is_number(self.decay) or not 0 <= self.decay < 1:
            raise ConfigError(f"decay must be at least 0 and below 1; got {self.decay!r}")
        if not isinstance(self.patience, int) or self.patience < 1:
            raise ConfigError(f"patience must be a whole number, at least 1; got {self.patience!r}")

    @property
    def eta(self) -> float:
        """The eta of a norm test that would settle there."""
        return 1.0 / math.sqrt(1.0 + self.c)

    def init(self) -> Averages:
        """Nothing seen."""
        return Averages()

    def planned(self, step: int, samples: int) -> int | None:
        """It hangs on the gradients."""
        return None

    def update(self, seen: Gradients, state: Averages) -> tuple[Size, Averages]:
        """One more observation, and the batch it asks for."""
        nothing = passed_over(seen, state)
        if nothing is not None:
            return nothing
        state = state.add(seen, self.decay)
        noise = state.noise
        if noise is None or state.weight < 1.0 - self.decay**self.patience - 1e-12:
            return Size(seen.total, noise=noise), state
        wanted = seen.most if not math.isfinite(noise) else max(1, round(self.c * noise))
        reason = f"the noise scale is {noise:.0f} samples, c={self.c:g} (as eta={self.eta:.2f}) asks for {wanted}"
        return Size(wanted, reason, noise), state
