"""`affine`: fit every worker's fixed and per-sample time, then divide so that the slowest is fastest.

    minimise  max_i (c_i + a_i b_i)    subject to    sum_i b_i = B,   lo_i <= b_i <= cap_i,   b_i whole

Symbols: c_i `fixed_s`, a_i `slope_s` (both from `fit`), b_i the batch of worker i, B `total`.

Why not the published rule p_i <- (p_i / t_i) / sum_j (p_j / t_j): it assumes c = 0. Its fixed point is right,
but each move leaves a part of the imbalance as large as the fixed share of the step, which takes five to
seven moves on real workers. A fitted line is exact as soon as two batch sizes have been seen.

The model and its exact solution follow LBB (J. Supercomput. 2024, affine online model) and LB-BSP (SoCC
2020, decisions at iteration boundaries); fit, rounding and the treatment of sudden changes are our own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.policies.balance.fit import Fit, Lines
from paceline.policies.balance.level import Floats, Ints, divide, least_makespan
from paceline.policies.balance.protocol import Weighting
from paceline.types import Decision, Limits, Observation


@dataclass(frozen=True, slots=True)
class Affine:
    """The default policy, without its dead-band: optimal for t_i = c_i + a_i b_i.

    Args:
        fit: settings of the online fit.

    Example:
        >>> from paceline.types import Limits, Observation
        >>> policy, limits = Affine(), Limits.of(2)
        >>> state = policy.init(2)
        >>> for b in ((128, 128), (169, 87)):
        ...     t = (0.2195 / 128 * b[0], 0.2 + 0.2261 / 128 * b[1])
        ...     seen = Observation(0, 0, False, 256, limits, b, t, (0.0, 0.0), t, t)
        ...     decision, state = policy.update(seen, state)
        >>> decision.split, round(decision.predicted_s, 3)
        ((187, 69), 0.322)
    """

    fit: Fit = field(default_factory=Fit)
    name: str = "affine"
    weighting: Weighting = "share"
    per_epoch: bool = False

    def init(self, num_workers: int) -> Lines:
        """No line known: equal shares."""
        return Lines.unknown(num_workers)

    def update(self, seen: Observation, state: Lines) -> tuple[Decision, Lines]:
        """Refit every line with the window's point, then solve for the split."""
        state = self.fit.update(state, np.array(seen.samples), np.array(seen.busy_s), np.array(seen.noise_s))
        split = self.split(seen.total, seen.limits, state)
        batches = np.array(split)
        times = _times(batches, state)
        slowest = int(np.argmax(times))
        busy = times[batches > 0]
        reason = (
            f"workers predicted within {1 - busy.min() / busy.max():.0%} of each other; slowest is worker "
            f"{slowest}: {state.fixed_s[slowest] * 1e3:.1f} ms + {state.slope_s[slowest] * 1e3:.3f} ms/sample "
            f"x {split[slowest]}"
        )
        return Decision(split=split, reason=reason, predicted_s=float(times[slowest])), state

    def split(self, total: int, limits: Limits, state: Lines) -> tuple[int, ...]:
        """The optimal whole-number split of `total`."""
        fixed, slope = _usable(state)

        def solve(units: int, lower: Ints, cap: Ints, who: Ints, g: int) -> Ints:
            return least_makespan(fixed[who], slope[who] * g, units, lower, cap)

        return divide(total, limits, fixed / total + slope, solve)

    def predict_s(self, split: tuple[int, ...], state: Lines) -> tuple[float, float] | None:
        """Slowest worker's time on its line, and the standard error of that worker's mean time."""
        if not state.weight.any():
            return None
        times = _times(np.array(split), state)
        slowest = int(np.argmax(times))
        weight = float(state.weight[slowest])
        return float(times[slowest]), float(state.noise_s[slowest]) / weight**0.5 if weight else 0.0


def _usable(state: Lines) -> tuple[Floats, Floats]:
    """Lines with every worker filled in: one never heard from is taken to be as slow as the slowest."""
    fixed, slope, known = state.fixed_s, state.slope_s, state.weight > 0
    if known.all():
        return fixed, slope
    if not known.any():
        return np.zeros_like(fixed), np.ones_like(slope)
    return np.where(known, fixed, fixed[known].max()), np.where(known, slope, slope[known].max())


def _times(split: Ints, state: Lines) -> Floats:
    fixed, slope = _usable(state)
    times: Floats = fixed + slope * split
    return times
