"""Behaviour added around any balance policy: when to change, how fast, how far.

Each wrapper holds another policy and is one itself, so they nest: `DeadBand(EveryNSteps(Affine(), 20))`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paceline.policies.balance.protocol import AnyBalance, Weighting
from paceline.types import Decision, Limits, Observation


@dataclass(frozen=True, slots=True)
class HeldState:
    """What the inner policy knows now, and what it knew when the plan in force was made."""

    live: Any
    held: Any
    last_step: int = -1


@dataclass(frozen=True, slots=True)
class _Around:
    """Shared by all wrappers: name, weighting and rhythm are the inner policy's."""

    inner: AnyBalance

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.inner.name

    @property
    def weighting(self) -> Weighting:
        """The inner policy's weighting."""
        return self.inner.weighting

    @property
    def per_epoch(self) -> bool:
        """The inner policy's rhythm."""
        return self.inner.per_epoch


@dataclass(frozen=True, slots=True)
class _Holding(_Around):
    """A wrapper that keeps the plan in force while the inner policy goes on learning."""

    def init(self, num_workers: int) -> HeldState:
        """Both states start equal."""
        state = self.inner.init(num_workers)
        return HeldState(live=state, held=state)

    def split(self, total: int, limits: Limits, state: HeldState) -> tuple[int, ...]:
        """What the plan in force gives."""
        return self.inner.split(total, limits, state.held)

    def predict_s(self, split: tuple[int, ...], state: HeldState) -> tuple[float, float] | None:
        """What the newest knowledge predicts."""
        return self.inner.predict_s(split, state.live)


@dataclass(frozen=True, slots=True)
class DeadBand(_Holding):
    """Change the plan only if the predicted gain beats `gain` plus the noise of the prediction.

    Args:
        inner: the policy that proposes.
        gain: smallest relative gain worth a change.
        noise: how many standard errors of the slowest worker's time are added to it.
    """

    gain: float = 0.005
    noise: float = 2.0

    def update(self, seen: Observation, state: HeldState) -> tuple[Decision, HeldState]:
        """Adopt the proposal if it is predicted to gain enough, else keep the plan and say so."""
        decision, live = self.inner.update(seen, state.live)
        current = self.inner.split(seen.total, seen.limits, state.held)
        if decision.split == current:
            return decision, HeldState(live, state.held, state.last_step)
        now, then_s = self.inner.predict_s(current, live), decision.predicted_s
        if now is None or then_s is None:
            return decision, HeldState(live, live, seen.step)
        gain = 1.0 - then_s / now[0]
        need = self.gain + self.noise * now[1] / now[0]
        if gain <= need:
            reason = f"kept: a change would gain {gain:.1%}, less than the {need:.1%} asked for"
            return Decision(current, reason, now[0]), HeldState(live, state.held, state.last_step)
        reason = f"gains {gain:.1%}: {decision.reason}"
        return Decision(decision.split, reason, then_s), HeldState(live, live, seen.step)


@dataclass(frozen=True, slots=True)
class EveryNSteps(_Holding):
    """Change the plan at most once in `steps` steps.

    Args:
        inner: the policy that proposes.
        steps: least number of steps between two changes.
    """

    steps: int = 1

    def update(self, seen: Observation, state: HeldState) -> tuple[Decision, HeldState]:
        """Learn always, adopt only when enough steps have passed."""
        decision, live = self.inner.update(seen, state.live)
        if seen.step - state.last_step >= self.steps:
            return decision, HeldState(live, live, seen.step)
        current = self.inner.split(seen.total, seen.limits, state.held)
        left = self.steps - (seen.step - state.last_step)
        reason = f"kept: the next change is due in {left} steps"
        return Decision(current, reason), HeldState(live, state.held, state.last_step)


@dataclass(frozen=True, slots=True)
class SmoothState:
    """The inner state and the smoothed seconds per sample of each worker (0 where not seen)."""

    inner: Any
    per_sample_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Smooth(_Around):
    """Show the inner policy exponentially smoothed times.

        r_i <- (1 - weight) r_i + weight t_i / b_i

    Args:
        inner: the policy that decides.
        weight: weight of the newest window, in (0, 1]; 1 changes nothing.
    """

    weight: float = 0.5

    def init(self, num_workers: int) -> SmoothState:
        """Nothing seen."""
        return SmoothState(self.inner.init(num_workers), (0.0,) * num_workers)

    def update(self, seen: Observation, state: SmoothState) -> tuple[Decision, SmoothState]:
        """Smooth the time per sample, hand the result on as if it had been seen."""
        rates = tuple(
            old if b <= 0 else t / b if old == 0 else (1 - self.weight) * old + self.weight * t / b
            for old, t, b in zip(state.per_sample_s, seen.busy_s, seen.samples, strict=True)
        )
        factor = tuple(r * b / t if b > 0 else 1.0 for r, b, t in zip(rates, seen.samples, seen.busy_s, strict=True))
        smooth = dataclasses.replace(
            seen,
            busy_s=_times(seen.busy_s, factor),
            wall_s=_times(seen.wall_s, factor),
            compute_s=_times(seen.compute_s, factor),
        )
        decision, inner = self.inner.update(smooth, state.inner)
        return decision, SmoothState(inner, rates)

    def split(self, total: int, limits: Limits, state: SmoothState) -> tuple[int, ...]:
        """The inner policy's split."""
        return self.inner.split(total, limits, state.inner)

    def predict_s(self, split: tuple[int, ...], state: SmoothState) -> tuple[float, float] | None:
        """The inner policy's prediction."""
        return self.inner.predict_s(split, state.inner)


def _times(values: tuple[float, ...], factors: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value * factor for value, factor in zip(values, factors, strict=True))


@dataclass(frozen=True, slots=True)
class Bounds(_Around):
    """Tighten the limits for the inner policy.

    Args:
        inner: the policy that decides.
        lower: fewest samples a worker takes.
        cap: most samples a worker takes; one number, or one per worker.
    """

    lower: int = 1
    cap: int | tuple[int | None, ...] | None = None

    def _tight(self, limits: Limits) -> Limits:
        own = Limits.of(limits.num_workers, lower=self.lower, cap=self.cap)
        return Limits(
            lower=tuple(max(pair) for pair in zip(own.lower, limits.lower, strict=True)),
            cap=tuple(min(pair) for pair in zip(own.cap, limits.cap, strict=True)),
            granularity=limits.granularity,
        )

    def init(self, num_workers: int) -> Any:
        """The inner policy's state."""
        return self.inner.init(num_workers)

    def update(self, seen: Observation, state: Any) -> tuple[Decision, Any]:
        """The inner policy's decision within the tighter limits."""
        return self.inner.update(dataclasses.replace(seen, limits=self._tight(seen.limits)), state)

    def split(self, total: int, limits: Limits, state: Any) -> tuple[int, ...]:
        """The inner policy's split within the tighter limits."""
        return self.inner.split(total, self._tight(limits), state)

    def predict_s(self, split: tuple[int, ...], state: Any) -> tuple[float, float] | None:
        """The inner policy's prediction."""
        return self.inner.predict_s(split, state)
