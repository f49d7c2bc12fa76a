"""`overlap`: nodes exchange what changed since the last anchor while they train on; nothing waits and no step is lost.

After H steps a replica sends its change, trains W more steps, and takes in the mean: x + (mean of what was sent - own part of
it). The mean over replicas is untouched by that, so the steps made meanwhile count in full (LOSCAR-SGD, arXiv 2605.20866).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.policies.sync.protocol import Action, Moment, Scope, SyncState, Terms, check_whole
from paceline.policies.sync.rounds import begin, check_delay, cycle
from paceline.policies.sync.steps import QSR, Fixed, Hide, Steps


@dataclass(frozen=True)
class Overlap:
    """Non-blocking averaging with a delay-corrected merge; what to use across slow links.

    Args:
        steps: the rule for H; by default the smallest that hides the transfer.
        delay: W, at most H; None is H: a whole round.
        terms: how exchanges are made.
        drift_limit: of the drift guard; 0 is none.
        settle: agree at the end of every epoch.
        warm_up: steps with gradients summed over everybody first.
    """

    steps: Steps = field(default_factory=Hide)
    delay: int | None = None
    terms: Terms = field(default_factory=Terms)
    drift_limit: float = 4.0
    settle: bool = True
    warm_up: int = 0

    name = "overlap"

    def __post_init__(self) -> None:
        least = {Fixed: "h", QSR: "base", Hide: "least"}.get(type(self.steps))
        check_whole("warm_up", self.warm_up, 0)
        check_delay(self.delay, getattr(self.steps, least) if least else self.steps.first())
        if self.terms.optimizer_state == "average" and self.delay != 0:
            raise ConfigError(
                "optimizer_state='average' needs an exchange that is waited for: while one is under way the state moves on. Use "
                "optimizer_state='keep', or sync='hierarchical'"
            )

    def init(self) -> tuple[Scope, SyncState]:
        """The node's gradients; everybody's in warm-up."""
        if self.warm_up:
            return "all", SyncState(phase="all")
        return self.terms.scope, begin(self.steps.first(), self.delay)

    def update(self, seen: Moment, state: SyncState) -> tuple[Action, SyncState]:
        """Send after H steps, take in W steps later."""
        if state.phase == "all":
            if seen.step < self.warm_up:
                return Action("all"), state
            after = begin(self.steps.first(), self.delay)
            return Action(self.terms.scope, reason=f"warm-up of {self.warm_up} steps is over"), after
        return cycle(
            seen,
            state,
            scope=self.terms.scope,
            steps=self.steps,
            delay=self.delay,
            drift_limit=self.drift_limit,
            settle=self.settle,
        )
