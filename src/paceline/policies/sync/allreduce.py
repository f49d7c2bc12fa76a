"""`allreduce`: gradients are summed over everybody in every step; replicas never differ."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.policies.sync.protocol import Action, Moment, Scope, SyncState, Terms


@dataclass(frozen=True)
class Allreduce:
    """Synchronous training, exact."""

    name = "allreduce"
    terms = Terms()

    def init(self) -> tuple[Scope, SyncState]:
        """Everybody's gradients."""
        return "all", SyncState(phase="all")

    def update(self, seen: Moment, state: SyncState) -> tuple[Action, SyncState]:
        """Nothing to do."""
        return Action("all"), state
