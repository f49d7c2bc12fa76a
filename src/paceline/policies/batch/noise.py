"""The gradient noise scale from the norms of parts of a batch (McCandlish et al. 2018), for parts of unequal size.

With q = sum b_m ||g_m||^2 / B and n = ||g||^2 over M parts of b_m samples, B in all:

    E q = ||G||^2 + M tr(S) / B,      E n = ||G||^2 + tr(S) / B

so both unknowns follow without bias:

    tr(S) = (q - n) B / (M - 1),      ||G||^2 = (M n - q) / (M - 1),      Bn = tr(S) / ||G||^2

A single step's ratio is wild while B is far below Bn: numerator and denominator are averaged over time, each by itself.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.policies.batch.protocol import Gradients, Size


def unbiased(seen: Gradients) -> tuple[float, float]:
    """Estimates of tr(S), the summed variance of a single sample's gradient, and of ||G||^2; the second may be negative.

    >>> unbiased(Gradients(step=0, total=4, most=8, sizes=(2.0, 2.0), squares=(3.0, 1.0), joint=1.5))
    (2.0, 1.0)
    """
    parts, total = len(seen.sizes), seen.samples
    mean = math.fsum(b * square for b, square in zip(seen.sizes, seen.squares, strict=True)) / total
    return (mean - seen.joint) * total / (parts - 1), (parts * seen.joint - mean) / (parts - 1)


@dataclass(frozen=True, slots=True)
class Averages:
    """Running means of both estimates.

    Args:
        trace: of tr(S).
        square: of ||G||^2.
        weight: what the first observations still lack; 1 - decay^count.
        skipped: observations that were not finite.
    """

    trace: float = 0.0
    square: float = 0.0
    weight: float = 0.0
    skipped: int = 0

    def add(self, seen: Gradients, decay: float) -> Averages:
        """With one more observation."""
        trace, square = unbiased(seen)
        keep = 1.0 - decay
        return Averages(
            decay * self.trace + keep * trace,
            decay * self.square + keep * square,
            decay * self.weight + keep,
            self.skipped,
        )

    @property
    def noise(self) -> float | None:
        """Bn; infinite while the signal drowns in noise, None before anything was seen."""
        if not self.weight:
            return None
        return max(0.0, self.trace) / self.square if self.square > 0 else math.inf


def passed_over(seen: Gradients, state: Averages) -> tuple[Size, Averages] | None:
    """The batch as it is and why, if an observation tells nothing; what is not finite is counted."""
    wrong = _wrong(seen)
    if not wrong:
        return None
    skipped = state.skipped + (not seen.finite and len(seen.sizes) > 1)
    return Size(seen.total, warning=wrong), dataclasses.replace(state, skipped=skipped)


def _wrong(seen: Gradients) -> str:
    if len(seen.sizes) < 2:
        return "one part of a batch shows no variance: at least two workers, or pace.step with micro-batches"
    if not seen.finite:
        return "gradients were not finite"
    if seen.joint == 0.0 and not any(seen.squares):
        return "the gradient is zero: all weights frozen, or the loss is constant"
    return ""
