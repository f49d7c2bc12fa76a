"""`daso`: the method of Coquelin et al. 2021 (arXiv 2104.05588), without the faults of its published code.

Nodes sum their gradients in every step. Every B steps the parameters are sent, and W steps later taken in:

    x = (2 W x + P mean of what was sent) / (2 W + P)

Phases: in warm-up and cool-down epochs gradients are summed over everybody; in between B and W cycle. A plateau of the training
loss (three epochs without 5 % gain) halves B and lowers W by one, down to 1; a plateau at B = 1 goes back to the start. Every
epoch ends with one exchange that is waited for.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.policies.sync.protocol import Action, Moment, Scope, SyncState, Terms, check_whole
from paceline.policies.sync.rounds import check_delay, cycle
from paceline.policies.sync.steps import Fixed

WARM_UP, CYCLING, COOL_DOWN = "warm-up", "cycling", "cool-down"


@dataclass(frozen=True)
class Daso:
    """Asynchronous selective optimisation, as printed.

    Args:
        b_max: B at the start, and after a plateau at B = 1.
        warm_up: epochs of it.
        cool_down: epochs of it; needs `epochs`.
        epochs: how many epochs the run has; None: unknown, and there is no cool-down.
        threshold: relative gain in loss that counts as one.
        patience: epochs without gain that are borne; the next one is a plateau.
        terms: how exchanges are made.
    """

    b_max: int = 4
    warm_up: int = 4
    cool_down: int = 4
    epochs: int | None = None
    threshold: float = 0.05
    patience: int = 2
    terms: Terms = field(default_factory=lambda: Terms(merge="daso"))

    name = "daso"

    def __post_init__(self) -> None:
        check_whole("b_max (B)", self.b_max, 1)
        for what in ("warm_up", "cool_down", "patience"):
            check_whole(what, getattr(self, what), 0)
        if self.epochs is not None:
            check_whole("epochs", self.epochs, 1)
            if self.warm_up + self.cool_down > self.epochs:
                raise ConfigError(
                    f"warm_up and cool_down must fit into the run: {self.warm_up} + {self.cool_down} epochs of {self.epochs}"
                )
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"threshold must be between 0 and 1; got {self.threshold!r}")
        if self.terms.level != "node":
            raise ConfigError(
                "daso sums gradients within nodes: terms.level must be 'node'. Use sync='local' for 'worker'"
            )
        if self.terms.compress != "none":
            raise ConfigError(
                "daso's merge keeps nothing of what a replica sent, so what compression rounds off would be lost: use "
                f"sync='overlap:compress={self.terms.compress}'"
            )
        if self.terms.optimizer_state == "average":
            raise ConfigError(
                "optimizer_state='average' needs exchanges that are waited for; daso's are not. Use 'keep' or 'reset'"
            )
        check_delay(self._first_delay, self.b_max, "W", "B")

    @property
    def _first_delay(self) -> int:
        return max(1, self.b_max // 4)

    def phase(self, epoch: int) -> str:
        """The phase of an epoch."""
        if epoch < self.warm_up:
            return WARM_UP
        if self.epochs is not None and epoch >= self.epochs - self.cool_down:
            return COOL_DOWN
        return CYCLING

    def init(self) -> tuple[Scope, SyncState]:
        """Everybody's gradients in warm-up."""
        state = SyncState(phase=self.phase(0), every=self.b_max, delay=self._first_delay)
        return _scope(state.phase), state

    def update(self, seen: Moment, state: SyncState) -> tuple[Action, SyncState]:
        """Cycle; at the end of an epoch look at the loss, and at the calendar."""
        action, after = Action("all"), state
        if state.phase == CYCLING:
            action, after = cycle(seen, state, scope="node", steps=Fixed(state.every), delay=state.delay)
        if not seen.ends_epoch:
            return action, after
        reason = ""
        if seen.loss is not None and math.isfinite(seen.loss):
            after, reason = self._judge(seen.loss, after)
        phase = self.phase(seen.epoch + 1)
        if phase != state.phase:
            reason = f"epoch {seen.epoch + 1}: {phase}" + (f"; {reason}" if reason else "")
            after = dataclasses.replace(after, phase=phase, since=0, age=-1)
        return dataclasses.replace(action, scope=_scope(phase), reason=reason), after

    def _judge(self, loss: float, state: SyncState) -> tuple[SyncState, str]:
        if loss < state.best * (1 - self.threshold):
            return dataclasses.replace(state, best=loss, bad=0), ""
        if state.bad < self.patience:
            return dataclasses.replace(state, bad=state.bad + 1), ""
        state = dataclasses.replace(state, bad=0)
        if state.phase != CYCLING:
            return state, ""
        if state.every == 1:
            b, w = self.b_max, self._first_delay
        else:
            b, w = max(1, state.every // 2), max(1, state.delay - 1)
        reason = f"the loss stalls at {loss:.4g}: B {state.every} -> {b}, W {state.delay} -> {w}"
        return dataclasses.replace(state, every=b, delay=w), reason


def _scope(phase: str) -> Scope:
    return "node" if phase == CYCLING else "all"
