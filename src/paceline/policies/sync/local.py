"""`local`: every worker makes H steps by itself, then all average their parameters (local SGD; Stich 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.policies.sync.protocol import Action, Moment, Scope, SyncState, Terms
from paceline.policies.sync.rounds import begin, cycle
from paceline.policies.sync.steps import Fixed, Steps


@dataclass(frozen=True)
class Local:
    """Blocking local SGD.

    Args:
        steps: the rule for H. H=1 without delay is what `allreduce` does, and is done that way: the gradients are summed.
        terms: how exchanges are made.
        drift_limit: of the drift guard; 0 is none.
        settle: agree at the end of every epoch.
    """

    steps: Steps = field(default_factory=lambda: Fixed(8))
    terms: Terms = field(default_factory=lambda: Terms(level="worker"))
    drift_limit: float = 4.0
    settle: bool = True

    name = "local"

    @property
    def _every_step(self) -> bool:
        plain = self.terms.outer_lr == 1 and self.terms.outer_momentum == 0 and self.terms.compress == "none"
        return self.steps == Fixed(1) and plain

    def init(self) -> tuple[Scope, SyncState]:
        """Nobody else's gradients."""
        if self._every_step:
            return "all", SyncState(phase="all")
        return self.terms.scope, begin(self.steps.first(), 0)

    def update(self, seen: Moment, state: SyncState) -> tuple[Action, SyncState]:
        """Exchange after H steps and wait for it."""
        if self._every_step:
            return Action("all"), state
        return cycle(
            seen,
            state,
            scope=self.terms.scope,
            steps=self.steps,
            delay=0,
            drift_limit=self.drift_limit,
            settle=self.settle,
        )
