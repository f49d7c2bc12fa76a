"""Online fit of t = fixed + slope * b for every worker, from one noisy point at a time.

Recency-weighted least squares: each new point multiplies the weight of all older ones by `memory`. Two
constraints are physical, fixed >= 0 and slope > 0. Three situations need more than least squares:

* One batch size seen so far: the line is not determined. Through the origin, slope = t / b, which is the
  published rule; its slope can only be too steep, so plans made with it move too little, never too far.
* Batch sizes seen that hardly differ: their difference says less about the slope than the noise does. The
  slope is shrunk towards the one believed so far, as a Gaussian prior with relative width `prior_width`
  against the measured noise:  slope = (S_bt + k * old) / (S_bb + k),  k = noise^2 / (prior_width * old)^2.
  With no noise k = 0 and this is plain least squares.
* A point that no line through the recent ones explains (beyond `jump` and four times the noise): the worker
  changed, and older points are dropped. One point does not tell whether its fixed cost or its slope did; plans
  should rather move too little than too far. Slower: the fixed cost is kept and the slope refitted. Faster: the
  slope is kept, and the fixed cost gives way first. Either way the next point settles it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.policies.balance.level import Floats
from paceline.types import to_plain

SHORTEST_S = 1e-9  # no clock measures less: a worker below it was not timed
STEEPEST_FIXED_SHARE = 0.95  # a line flatter than this share of t being fixed says nothing about samples


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Per worker: the line, and the decayed moments it was fitted from. Empty workers have weight 0."""

    fixed_s: Floats
    slope_s: Floats
    weight: Floats
    mean_b: Floats
    mean_t: Floats
    s_bb: Floats
    s_bt: Floats
    noise_s: Floats

    @classmethod
    def unknown(cls, num_workers: int) -> Lines:
        """No worker seen yet."""
        return cls(*(np.zeros(num_workers) for _ in range(8)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lines) and to_plain(self) == to_plain(other)


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings of the online fit; see the module's text for the method.

    Args:
        memory: weight that older points keep when a new one arrives, in (0, 1).
        prior_width: relative standard deviation of the slope believed before the data speak.
        jump: relative error of a point above which the worker is taken to have changed.
    """

    memory: float = 0.85
    prior_width: float = 0.5
    jump: float = 0.1

    def update(self, lines: Lines, samples: Floats, busy_s: Floats, noise_s: Floats) -> Lines:
        """Take in one point (samples, busy_s) per worker; workers with samples 0 told nothing."""
        fixed, slope, weight, noise = lines.fixed_s, lines.slope_s, lines.weight, lines.noise_s
        told = (samples > 0) & (busy_s >= SHORTEST_S)
        b, t = np.where(told, samples, 1.0), np.where(told, busy_s, 1.0)
        known = weight > 0

        new_weight = self.memory * weight + 1.0
        share, kept = 1.0 / new_weight, self.memory * weight / new_weight
        db, dt = b - lines.mean_b, t - lines.mean_t
        new_b, new_t = lines.mean_b + share * db, lines.mean_t + share * dt
        new_bb = self.memory * lines.s_bb + kept * db * db
        new_bt = self.memory * lines.s_bt + kept * db * dt
        blended = np.where(noise > 0, self.memory * noise + (1 - self.memory) * noise_s, noise_s)
        new_noise = np.where(noise_s > 0, blended, noise)  # 0: too few steps to tell

        with np.errstate(divide="ignore", invalid="ignore"):
            k = np.where(known, (new_noise / (self.prior_width * slope)) ** 2, 0.0)
            a = np.where(new_bb + k > 0, (new_bt + k * slope) / (new_bb + k), slope)
            c = new_t - a * new_b
            # Physical bounds: a negative fixed cost becomes a line through the origin, a line that is
            # flat or falls keeps a small slope.
            through_origin = new_t / new_b
            flat = (1 - STEEPEST_FIXED_SHARE) * through_origin
            a, c = np.where(c < 0, through_origin, a), np.where(c < 0, 0.0, c)
            a, c = np.where(a < flat, flat, a), np.where(a < flat, new_t - flat * new_b, c)
        error = np.abs(t - (c + a * b))
        jumped = known & (error > np.maximum(self.jump * t, 4 * new_noise))
        restart = ~known | jumped
        kept_s = np.where(known, np.clip(t - slope * b, 0.0, fixed), fixed)
        c = np.where(restart, np.minimum(kept_s, STEEPEST_FIXED_SHARE * t), c)
        a = np.where(restart, (t - c) / b, a)

        def pick(fresh: Floats | float, updated: Floats, old: Floats) -> Floats:
            return np.where(told, np.where(restart, fresh, updated), old)

        return Lines(
            fixed_s=pick(c, c, fixed),
            slope_s=pick(a, a, slope),
            weight=pick(1.0, new_weight, weight),
            mean_b=pick(b, new_b, lines.mean_b),
            mean_t=pick(t, new_t, lines.mean_t),
            s_bb=pick(0.0, new_bb, lines.s_bb),
            s_bt=pick(0.0, new_bt, lines.s_bt),
            noise_s=pick(new_noise, new_noise, noise),
        )
