"""Who can take part, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError, unknown_name
from paceline.policies.balance import BALANCE, policy
from paceline.policies.batch import BATCH, RULES, batch_policy
from paceline.policies.partition import chosen
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
    Contender("adaptdl-auto", "adaptdl", {"most": 4096}, peer="adaptdl"),
    Contender("torchft", "torchft", peer="torchft"),
    Contender("torchft-diloco", "torchft", {"diloco": 16}, peer="torchft"),
)
_POLICIES = ("equal", "dbs", "dp", "edp", "affine")


def contender(name: str) -> Contender:
    """A contender by name.

    `ddp`, a peer, or paceline with its policies, joined by plus signs: `affine`, `overlap:h=8+affine`,
    `noise-scale:c=2+affine+sqrt` (with a learning-rate rule), `affine+bf16` (compressed gradients). Without a balance policy shares
    are equal. `+b=512` sets the global batch, and the learning rate by the same rule: `affine+b=512+sqrt`. `shards=balanced` trains on
    owned shards sized by speed, `shards=balanced/even` on equal ones.
    """
    for one in _OTHERS:
        if one.name == name:
            return one
    options: dict[str, Any] = {}
    for part in name.split("+"):
        head = part.partition(":")[0]
        for kind, known, checked in (
            ("sync", set(SYNC) - {"allreduce"}, sync_policy),
            ("batch", BATCH, batch_policy),
            ("balance", {*BALANCE, "fixed"}, policy),
        ):
            if head in known and kind not in options:
                checked(part)
                options[kind] = part
                break
        else:
            if part == "bf16":
                options["wrap"] = {"compress": part}
            elif part in RULES:
                options["lr_rule"] = part
            elif part.startswith("shards="):
                method, _, even = part.removeprefix("shards=").partition("/")
                chosen(method, 1)
                if even not in ("", "even"):
                    raise ConfigError(f"shards are sized by speed, or 'even'; got {part!r}")
                options["shards"] = method
                options["split"] = None if even else _SPLIT
            elif part.startswith("b=") and part[2:].isdecimal() and int(part[2:]):
                options["batch_size"] = int(part[2:])
            else:
                raise unknown_name("contender", name, [*(one.name for one in _OTHERS), *_POLICIES, *SYNC, *BATCH])
    return Contender(name, "ours", {"balance": "equal", **options})
