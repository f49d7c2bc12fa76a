"""`hierarchical`: gradients are summed within a node in every step, parameters averaged over nodes every H steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.policies.sync.local import Local
from paceline.policies.sync.protocol import Terms


@dataclass(frozen=True)
class Hierarchical(Local):
    """`Local` with nodes for replicas."""

    terms: Terms = field(default_factory=Terms)

    name = "hierarchical"
