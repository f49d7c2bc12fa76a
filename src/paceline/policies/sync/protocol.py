"""What a sync policy is: after every optimizer step it says what to exchange now, what to take in, and with whom gradients
are summed in the next step. Numbers in, numbers out; tensors are the runtime's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.errors import ConfigError

Scope = Literal["all", "node", "own"]
Level = Literal["worker", "node"]
Merge = Literal["corrected", "daso"]
Compression = Literal["none", "bf16", "int8"]
OptimizerState = Literal["keep", "average", "reset"]
OPTIONS: dict[str, tuple[str, ...]] = {
    "level": ("worker", "node"),
    "merge": ("corrected", "daso"),
    "compress": ("none", "bf16", "int8"),
    "optimizer_state": ("keep", "average", "reset"),
}


@dataclass(frozen=True, slots=True)
class Terms:
    """How an exchange is made; fixed for a run.

    Args:
        level: what a replica is. "node": workers of a node sum their gradients in every step and are one replica;
            "worker": everyone is a replica.
        merge: what becomes of the steps made while an exchange was under way. "corrected" keeps them
            (x + mean of what was sent - own part of it); "daso" weighs them against the mean, as published.
        compress: what goes over links between nodes. Roundings stay in the sender's parameters and go with the next exchange.
        optimizer_state: after an exchange, "keep" each replica's own, "average" it, or "reset" it to nothing.
        outer_lr: the anchor moves by this much of the mean change.
        outer_momentum: Nesterov momentum of the anchor.
        fragments: parts the parameters are cut into; one goes at a time.
        outlier: a replica whose change is this many times the others' median is left out.
    """

    level: Level = "node"
    merge: Merge = "corrected"
    compress: Compression = "none"
    optimizer_state: OptimizerState = "keep"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    fragments: int = 1
    outlier: float = 10.0

    def __post_init__(self) -> None:
        for name, known in OPTIONS.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        check_whole("fragments", self.fragments, 1)
        for name, least in (("outer_lr", 0.0), ("outer_momentum", 0.0), ("outlier", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
                raise ConfigError(f"{name} must be a number of at least {least:g}; got {value!r}")
        if self.outer_momentum >= 1 or self.outer_lr == 0:
            raise ConfigError(
                f"outer_lr must be positive and outer_momentum below 1; got {self.outer_lr:g} and {self.outer_momentum:g}"
            )

    @property
    def scope(self) -> Scope:
        """Whose gradients are summed between exchanges."""
        return "node" if self.level == "node" else "own"


@dataclass(frozen=True, slots=True)
class Round:
    """What the newest exchange told; the same numbers on every worker.

    Args:
        step_s: a step's time on the slowest worker.
        transfer_s: how long the exchange before this one took.
        drift: how far replicas went apart: their variance over the squared length of their mean, divided by their number
            less one. Nothing in common is 1; above it they pull against each other.
        left_out: replicas that were not counted.
    """

    step_s: float
    transfer_s: float
    drift: float
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy sees after an optimizer step.

    Args:
        step: optimizer steps made so far.
        epoch: the epoch of that step.
        ends_epoch: whether it was the epoch's last.
        lr: the learning rate of the next step.
        round: of the newest exchange that was taken in, if any.
        loss: mean training loss of the epoch that ends here, where it was reported.
    """

    step: int
    epoch: int = 0
    ends_epoch: bool = False
    lr: float = 0.0
    round: Round | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """What to do now, in this order.

    Args:
        merge: take in the exchange under way (wait for it if it has not arrived).
        send: start an exchange.
        wait: and take it in at once.
        agree: replicas must be equal after it, to the last bit: nothing is compressed.
        fragment: which part; -1 is all of it.
        scope: whose gradients are summed in the next step: everybody's, the node's, or nobody else's.
        reason: one sentence, where something changes.
    """

    scope: Scope
    merge: bool = False
    send: bool = False
    wait: bool = False
    agree: bool = False
    fragment: int = -1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SyncState:
    """Where a policy stands; plain numbers.

    Args:
        phase: "all" while gradients are summed over everybody, "rounds" otherwise; daso has names of its own.
        every: steps in the round under way (H, or B).
        delay: steps between sending and taking in (W).
        since: steps since the last send.
        age: steps since the send that is under way; -1 if none is.
        fragment: the part that goes next.
        shrink: the drift guard divides H by this.
        best: lowest loss so far.
        bad: epochs since it fell.
        lr: the first learning rate seen.
    """

    phase: str = "rounds"
    every: int = 1
    delay: int = 0
    since: int = 0
    age: int = -1
    fragment: int = 0
    shrink: int = 1
    best: float = math.inf
    bad: int = 0
    lr: float = 0.0


class Sync(Protocol):
    """When and how do the replicas agree? A frozen dataclass of settings, with a state of plain numbers."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    @property
    def terms(self) -> Terms:
        """How exchanges are made."""
        ...

    def init(self) -> tuple[Scope, SyncState]:
        """Whose gradients are summed in the first step, and the state before it."""
        ...

    def update(self, seen: Moment, state: SyncState) -> tuple[Action, SyncState]:
        """After an optimizer step: what to do."""
        ...


def check_whole(name: str, value: object, least: int, why: str = "") -> None:
    """A whole number of at least `least`, or a ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number, at least {least}; got {value!r}{why}")
