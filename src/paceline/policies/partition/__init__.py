"""Which samples belong to which worker? One method, one file; `divide` finds them by name.

| name | shards |
|---|---|
| `shuffle` (default of a run) | none: one global shuffle, cut anew in every step; exact |
| `contiguous` | runs of the dataset's order |
| `stratified` | every class by quota, random within it |
| `rcd`, `rcd-cut` | He and Dube 2022 as printed, with facility location or graph cut; worse than random for unequal speeds |
| `exact` | greedy by the scaled graph cut; up to some ten thousand samples |
| `balanced` | assignment on random Fourier features; any number of samples |
| `auto` | `exact` up to 20000 samples, `balanced` above |

All divide by the same quotas: every class in proportion to speed, to within one sample (`contiguous` apart).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from paceline.errors import ConfigError, unknown_name
from paceline.policies.partition.balanced import balanced
from paceline.policies.partition.exact import exact
from paceline.policies.partition.quotas import Ints
from paceline.policies.partition.rcd import rcd
from paceline.policies.partition.spread import Floats
from paceline.policies.partition.stratified import contiguous, stratified, unlabelled

Divide = Callable[[Floats, Ints, Ints, np.random.Generator], Ints]
AUTO = 20_000
PARTITIONS: dict[str, Divide] = {
    "random": lambda features, classes, quota, random: unlabelled(classes, quota, random),
    "contiguous": lambda features, classes, quota, random: contiguous(classes, quota, random),
    "stratified": lambda features, classes, quota, random: stratified(classes, quota, random),
    "rcd": partial(rcd, value="facility"),
    "rcd-cut": partial(rcd, value="cut"),
    "exact": exact,
    "balanced": balanced,
}


def chosen(name: str, count: int) -> str:
    """The method of that name, with `auto` resolved for so many samples."""
    if name == "auto":
        return "exact" if count <= AUTO else "balanced"
    if name == "shuffle":
        raise ConfigError("'shuffle' is what a run without shards does: leave partition= out")
    if name not in PARTITIONS:
        raise unknown_name("partition method", name, [*PARTITIONS, "auto"])
    return name


def divide(name: str, features: Floats, classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """The part of every sample, by the method of that name."""
    return PARTITIONS[chosen(name, len(classes))](features, classes, quota, random)
