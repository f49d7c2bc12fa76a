"""`post-local`: gradients are summed over everybody at first, local rounds come later (Lin et al. 2018, arXiv 1808.07217)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.policies.sync.local import Local
from paceline.policies.sync.protocol import Action, Moment, Scope, SyncState, Terms
from paceline.policies.sync.steps import Fixed, Steps


@dataclass(frozen=True)
class PostLocal:
    """All-reduce, then `local`.

    Args:
        after: switch after that many steps; None switches when the learning rate has fallen below `drop` times its first value.
        drop: see above.
        steps: the rule for H.
        terms: how exchanges are made.
        drift_limit: of the drift guard; 0 is none.
        settle: agree at the end of every epoch.
    """

    after: int | None = None
    drop: float = 0.51
    steps: Steps = field(default_factory=lambda: Fixed(8))
    terms: Terms = field(default_factory=lambda: Terms(level="worker"))
    drift_limit: float = 4.0
    settle: bool = True

    name = "post-local"

    def __post_init__(self) -> None:
        if self.after is not None and (not isinstance(self.after, int) or self.after < 0):
            raise ConfigError(f"after must be a number of steps, at least 0; got {self.after!r}")
        if not 0 < self.drop < 1:
            raise ConfigError(f"drop must be between 0 and 1: the part of the first learning rate; got {self.drop!r}")

    @property
    def _local(self) -> Local:
        return Local(self.steps, self.terms, self.drift_limit, self.settle)

    def init(self) -> tuple[Scope, SyncState]:
        """Everybody's gradients, unless the switch is at step 0."""
        return self._local.init() if self.after == 0 else ("all", SyncState(phase="all"))

    def update(self, seen: Moment, state: SyncState) -> tuple[Action, SyncState]:
        """Switch when it is time; then as `local`."""
        if state.phase != "all" or self.steps == Fixed(1):
            return self._local.update(seen, state)
        first = state.lr or seen.lr
        if self.after is None:
            over, reason = seen.lr < self.drop * first, f"the learning rate fell from {first:g} to {seen.lr:g}"
        else:
            over, reason = seen.step >= self.after, f"step {seen.step}"
        if not over:
            return Action("all"), dataclasses.replace(state, lr=first)
        scope, state = self._local.init()
        return Action(scope, reason=f"{reason}: local rounds of {state.every} steps from here"), state
