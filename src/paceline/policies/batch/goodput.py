"""`goodput`: the batch that makes most progress per second, from the gradient's noise and from what a step costs.

A step of B samples takes time in proportion to F + B, where F is its fixed cost (launches, latency, the exchange) in samples. It is
worth B / (Bn + B) of a step without noise (McCandlish et al. 2018). Progress over time,

    B / ((F + B) (Bn + B)),    is largest at    B = sqrt(Bn F):

the geometric mean of the noise scale and the fixed cost. A constant c in B = c Bn fits one cluster; this one finds it.
Pollux (Qiao et al. 2021) searches the same product of throughput and efficiency on a grid, and calls it goodput.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.policies.batch.noise import Averages
from paceline.policies.batch.noise_scale import NoiseScale
from paceline.policies.batch.protocol import Gradients, Size

EXPLORE = 1.25  # times the batch, until its size has told what a step costs before its first sample
FAR = 2.0  # times the first batch: no further to find that out


@dataclass(frozen=True, slots=True)
class Goodput(NoiseScale):
    """Follow the geometric mean of noise scale and fixed cost.

    Args:
        c: times that many; 1 is the optimum if the learning rate follows the batch.
        decay: as for `noise-scale`.
        patience: as for `noise-scale`.
    """

    name = "goodput"

    def update(self, seen: Gradients, state: Averages) -> tuple[Size, Averages]:
        """One more observation, and the batch it asks for."""
        size, state = NoiseScale.update(self, seen, state)
        if size.noise is None or not size.reason or not math.isfinite(size.noise):
            return size, state
        if seen.fixed is None and seen.total >= FAR * seen.first:
            return size, state  # it will not be known: one noise scale
        if seen.fixed is None:
            wanted = math.ceil(EXPLORE * seen.total)
            reason = f"{wanted} samples tell what a step of {seen.total} costs before its first"
        else:
            wanted = max(1, round(self.c * math.sqrt(size.noise * seen.fixed)))
            reason = (
                f"the noise scale is {size.noise:.0f} samples and a step's fixed cost is worth {seen.fixed:.0f}: "
                f"{wanted} make most progress per second"
            )
        return dataclasses.replace(size, total=wanted, reason=reason), state
