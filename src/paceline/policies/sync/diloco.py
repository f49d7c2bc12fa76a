"""`diloco`: many inner steps, then an outer step with Nesterov momentum on the mean change (Douillard et al. 2023, arXiv
2311.08105); in fragments and with a delay it streams (arXiv 2501.18512).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.policies.sync.protocol import Action, Moment, Scope, SyncState, Terms
from paceline.policies.sync.rounds import begin, check_delay, cycle
from paceline.policies.sync.steps import Fixed


@dataclass(frozen=True)
class Diloco:
    """Inner optimizer, outer Nesterov.

    Args:
        h: inner steps between two outer steps of a fragment.
        delay: inner steps between sending a fragment and taking it in; at most h / fragments.
        terms: outer learning rate and momentum, fragments, and the rest.
        settle: make an outer step of everything at the end of every epoch.
    """

    h: int = 32
    delay: int = 0
    terms: Terms = field(default_factory=lambda: Terms(outer_lr=0.7, outer_momentum=0.9))
    settle: bool = True

    name = "diloco"

    def __post_init__(self) -> None:
        Fixed(self.h)
        if self.terms.fragments > self.h:
            raise ConfigError(
                f"fragments must not exceed H: one goes in H / fragments steps; got {self.terms.fragments} of {self.h}"
            )
        check_delay(self.delay, self.h // self.terms.fragments, of="H / fragments")
        if self.terms.optimizer_state == "average" and self.delay:
            raise ConfigError(
                "optimizer_state='average' needs delay=0: while a fragment is under way the state moves on"
            )

    def init(self) -> tuple[Scope, SyncState]:
        """The node's gradients."""
        return self.terms.scope, begin(self.h, self.delay)

    def update(self, seen: Moment, state: SyncState) -> tuple[Action, SyncState]:
        """A fragment every h / fragments steps."""
        return cycle(
            seen,
            state,
            scope=self.terms.scope,
            steps=Fixed(self.h),
            delay=self.delay,
            settle=self.settle,
            fragments=self.terms.fragments,
        )
