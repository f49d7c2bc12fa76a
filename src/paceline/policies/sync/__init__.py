"""When and how do the replicas agree? One method, one file; `sync_policy` finds them by name.

| name | within a node | between nodes | waits | extra fp32 copies of the parameters |
|---|---|---|---|---|
| `allreduce` (default) | every step | every step | every step | 0 |
| `local` | after H steps | after H steps | for each exchange | 1 |
| `post-local` | every step, later after H | the same | for each exchange | 1 |
| `hierarchical` | every step | after H steps | for each exchange | 1 |
| `daso` | every step | every B steps, taken in W later | at the end of epochs | 2 |
| `overlap` | every step | after H steps, taken in W later | at the end of epochs | 2 |
| `gossip` | every F steps with neighbours on a graph; nobody agrees with everybody | the same | for neighbours | 0 |
| `diloco` | every step | after H steps, outer Nesterov | for each exchange, unless delayed | 2; delayed 2 + 1 / fragments |
"""

from __future__ import annotations

import dataclasses

from paceline.errors import ConfigError, unknown_name
from paceline.policies.named import settings_of, value
from paceline.policies.sync.allreduce import Allreduce
from paceline.policies.sync.daso import Daso
from paceline.policies.sync.diloco import Diloco
from paceline.policies.sync.gossip import Gossip
from paceline.policies.sync.hierarchical import Hierarchical
from paceline.policies.sync.local import Local
from paceline.policies.sync.overlap import Overlap
from paceline.policies.sync.post_local import PostLocal
from paceline.policies.sync.protocol import Action, Moment, Round, Scope, Sync, SyncState, Terms
from paceline.policies.sync.steps import QSR, Fixed, Hide

SYNC: dict[str, type] = {
    "allreduce": Allreduce,
    "local": Local,
    "post-local": PostLocal,
    "hierarchical": Hierarchical,
    "daso": Daso,
    "overlap": Overlap,
    "diloco": Diloco,
    "gossip": Gossip,
}


def sync_policy(name: str) -> Sync:
    """The sync policy of that name; `overlap:h=8,compress=int8` carries settings.

    >>> sync_policy("overlap:h=8,compress=int8").terms.compress
    'int8'
    """
    head, _, rest = name.partition(":")
    if head not in SYNC:
        raise unknown_name("sync policy", head, SYNC)
    return _configured(SYNC[head], head, settings_of(rest, "a sync policy", f"{head}:h=8"))


def _configured(kind: type, head: str, given: dict[str, str]) -> Sync:
    own = {f.name for f in dataclasses.fields(kind)}
    inner = {f.name for f in dataclasses.fields(Terms)} if "terms" in own else set()
    settings: dict[str, object] = {}
    terms: dict[str, object] = {}
    for key, text in given.items():
        read = value(text)
        if key == "h" and "steps" in own:
            settings["steps"] = Fixed(read)
        elif key == "steps" and "steps" in own:
            settings["steps"] = _rule(text)
        elif key in own - {"terms", "steps"}:
            settings[key] = read
        elif key in inner:
            terms[key] = text if isinstance(getattr(Terms(), key), str) else read
        else:
            raise unknown_name(
                f"setting of {head}", key, sorted((own - {"terms"}) | inner | ({"h"} if "steps" in own else set()))
            )
    if terms:
        settings["terms"] = dataclasses.replace(kind().terms, **terms)
    made: Sync = kind(**settings)
    return made


def _rule(text: str) -> Fixed | QSR | Hide:
    rules: dict[str, type] = {"qsr": QSR, "hide": Hide}
    if text not in rules:
        raise ConfigError(f"steps must be 'hide' or 'qsr', or say h=8 for a fixed number; got {text!r}")
    made: QSR | Hide = rules[text]()
    return made


__all__ = [
    "QSR",
    "SYNC",
    "Action",
    "Allreduce",
    "Daso",
    "Diloco",
    "Fixed",
    "Gossip",
    "Hide",
    "Hierarchical",
    "Local",
    "Moment",
    "Overlap",
    "PostLocal",
    "Round",
    "Scope",
    "Sync",
    "SyncState",
    "Terms",
    "sync_policy",
]
