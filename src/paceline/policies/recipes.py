"""Published training methods that take more than one policy: a name for the settings that make them.

| recipe | settings | as published by |
|---|---|---|
| `rcd-sgd` | mixing with neighbours on a ring every second step; shards by `paceline.partition(..., method="rcd")` go to the loader | He and Dube 2022 |
| `adaptive-local` | H local steps, then averaging; the norm test of each round's last gradients decides the next batch | Lau et al. 2024 |

A recipe stands in for settings that nobody gave: `recipe="adaptive-local", sync="local:h=8"` has H = 8.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import unknown_name

RECIPES: dict[str, dict[str, str]] = {
    "rcd-sgd": {"sync": "gossip:every=2,graph=ring"},
    "adaptive-local": {"sync": "local:h=16", "batch": "norm-test:eta=0.8,at=last"},
}


def recipe(name: str) -> Mapping[str, str]:
    """The settings of a recipe.

    >>> recipe("adaptive-local")["sync"]
    'local:h=16'
    """
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]
