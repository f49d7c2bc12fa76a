"""`norm-test`: grow until the gradient's variance is a share of its square (Byrd et al. 2012; with local steps Lau et al. 2024).

The exact test asks E||g - G||^2 <= eta^2 ||G||^2. What can be measured is

    T = tr(S) / (eta^2 ||g||^2),        B <- max(B, ceil(T))

and ||g||^2 holds noise itself, so B settles at c Bn with c = 1 / eta^2 - 1, growing by at most 1 / eta^2 at a time: the norm test
follows the noise scale in disguise. It never shrinks; on a noisy statistic that ratchets upwards. `noise-scale` does neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.policies.batch.noise import Averages, passed_over, unbiased
from paceline.policies.batch.protocol import Gradients, Needs, Size, check_share

_DECAY = 0.9  # of the noise scale that is told; the test itself looks at one step, as published


@dataclass(frozen=True, slots=True)
class NormTest:
    """The published test.

    Args:
        eta: how much of the gradient's length its noise may be.
        at: the step of a round of local training that is looked at; as published the last, where replicas have drifted apart.
    """

    eta: float = 0.5
    at: Literal["first", "last"] = "first"

    name = "norm-test"
    needs: ClassVar[Needs] = "norms"

    def __post_init__(self) -> None:
        check_share(
            "eta",
            self.eta,
            "The batch settles at c = 1 / eta^2 - 1 times the noise scale: eta = 1 would never grow it, eta = 0 never stop",
        )

        if self.at not in ("first", "last"):
            raise ConfigError(f"at must be 'first' or 'last', the step of a round that is looked at; got {self.at!r}")

    @property
    def c(self) -> float:
        """The batch it settles at, in noise scales."""
        return 1.0 / self.eta**2 - 1.0

    def init(self) -> Averages:
        """Nothing seen."""
        return Averages()

    def planned(self, step: int, samples: int) -> int | None:
        """It hangs on the gradients."""
        return None

    def update(self, seen: Gradients, state: Averages) -> tuple[Size, Averages]:
        """Test one step."""
        nothing = passed_over(seen, state)
        if nothing is not None:
            return nothing
        state = state.add(seen, _DECAY)
        trace, _ = unbiased(seen)
        allowed, largest = self.eta**2 * seen.joint, math.ceil(seen.samples / self.eta**2)
        # Never more than `largest`, by arithmetic alone; but the division may round or overflow.
        wanted = largest if trace >= allowed * largest else math.ceil(trace / allowed)
        if wanted <= seen.total:
            return Size(seen.total, noise=state.noise), state
        reason = f"norm test: variance over square asks for {wanted} samples at eta={self.eta:g} (c={self.c:.3g})"
        return Size(wanted, reason, state.noise), state
