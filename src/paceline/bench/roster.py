"""Who can take part, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError, unknown_name
from paceline.policies.balance import policy

_SPLIT = "by hand"


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Args:
        name: what suites and tables call it.
        module: its file in `contenders/`.
        options: its settings; a `split` of "by hand" is filled in with the best split for the cluster.
        peer: whether it lives in an environment of its own.
    """

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: bool = False

    def settings(self, split: tuple[int, ...]) -> dict[str, Any]:
        """The options for a cluster."""
        return {**self.options, **({"split": list(split)} if self.options.get("split") == _SPLIT else {})}


SOLO = Contender("solo", "solo", {"split": _SPLIT})
_OTHERS = (
    Contender("ddp", "ddp"),
    Contender("hand-tuned", "ddp", {"split": _SPLIT}),
    Contender("accelerate", "accelerate", peer=True),
    Contender("fabric", "fabric", peer=True),
    Contender("adaptdl", "adaptdl", peer=True),
    Contender("torchft", "torchft", peer=True),
)
_POLICIES = ("equal", "dbs", "dp", "edp", "affine")


def contender(name: str) -> Contender:
    """A contender by name: `ddp`, a peer, or a balance policy of paceline; `affine+bf16` compresses its gradients."""
    for one in _OTHERS:
        if one.name == name:
            return one
    balance, plus, compress = name.partition("+")
    options: dict[str, Any] = {"balance": balance}
    if compress:
        options["wrap"] = {"compress": compress}
    try:
        if plus and compress != "bf16":
            raise ConfigError("bf16 is all there is")
        policy(balance)
    except ConfigError:
        raise unknown_name("contender", name, [*(one.name for one in _OTHERS), *_POLICIES]) from None
    return Contender(name, "ours", options)
