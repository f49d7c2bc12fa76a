"""Who can take part, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError, unknown_name
from paceline.policies.balance import policy
from paceline.policies.sync import SYNC, sync_policy

_SPLIT = "by hand"


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Args:
        name: what suites and tables call it.
        module: its file in `contenders/`.
        options: its settings; a `split` of "by hand" is filled in with the best split for the cluster.
        peer: the environment it lives in, if it has one of its own.
    """

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: str = ""

    def settings(self, split: tuple[int, ...]) -> dict[str, Any]:
        """The options for a cluster."""
        return {**self.options, **({"split": list(split)} if self.options.get("split") == _SPLIT else {})}


SOLO = Contender("solo", "solo", {"split": _SPLIT})
_OTHERS = (
    Contender("ddp", "ddp"),
    Contender("hand-tuned", "ddp", {"split": _SPLIT}),
    Contender("ddp+bf16", "ddp", {"hook": "bf16"}),
    Contender("ddp+fp16", "ddp", {"hook": "fp16"}),
    Contender("ddp+powersgd", "ddp", {"hook": "powersgd"}),
    Contender("torch-post-local", "averagers", {"kind": "post-local", "every": 8, "warm_up": 10}),
    Contender("torch-hierarchical", "averagers", {"kind": "hierarchical", "every": 8, "warm_up": 10}),
    Contender("accelerate", "accelerate", peer="accelerate"),
    Contender("accelerate-local-sgd", "accelerate", {"local_sgd": 8}, peer="accelerate"),
    Contender("fabric", "fabric", peer="fabric"),
    Contender("adaptdl", "adaptdl", peer="adaptdl"),
    Contender("torchft", "torchft", peer="torchft"),
    Contender("torchft-diloco", "torchft", {"diloco": 16}, peer="torchft"),
)
_POLICIES = ("equal", "dbs", "dp", "edp", "affine")


def contender(name: str) -> Contender:
    """A contender by name.

    `ddp`, a peer, a balance policy of paceline, or a sync policy with its settings: `affine`, `overlap:h=8`. After a plus,
    `affine+bf16` compresses its gradients, and `overlap+affine` balances (equal shares otherwise).
    """
    for one in _OTHERS:
        if one.name == name:
            return one
    head, plus, tail = name.partition("+")
    try:
        if head.partition(":")[0] in SYNC and head != "allreduce":
            sync_policy(head)
            policy(tail or "equal")
            return Contender(name, "ours", {"sync": head, "balance": tail or "equal"})
        if plus and tail != "bf16":
            raise ConfigError("bf16 is all there is")
        policy(head)
    except ConfigError as error:
        if head.partition(":")[0] in SYNC:
            raise
        raise unknown_name("contender", name, [*(one.name for one in _OTHERS), *_POLICIES, *SYNC]) from error
    return Contender(name, "ours", {"balance": head, **({"wrap": {"compress": tail}} if tail else {})})
