"""How large is the global batch? One method, one file; `batch_policy` finds them by name.

| name | the batch | measures |
|---|---|---|
| `constant` (default) | stays | nothing |
| `schedule` | is written down: `schedule:0=256,50000=512` (samples), `schedule:unit=steps,...` | nothing |
| `norm-test` | grows until noise is a share `eta` of the gradient (Lau et al. 2024) | norms |
| `inner-product` | grows until the gradient points downhill (Bollapragada et al. 2018) | inner products |
| `augmented` | and does not stray sideways | inner products |
| `goodput` | makes most progress per second, from the noise scale and the fixed cost of a step (Qiao et al. 2021) | norms |
| `noise-scale` | follows `c` times the gradient noise scale, up and down (McCandlish et al. 2018) | norms |
"""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.errors import ConfigError, unknown_name
from paceline.policies.batch.augmented import Augmented
from paceline.policies.batch.constant import Constant
from paceline.policies.batch.goodput import Goodput
from paceline.policies.batch.inner_product import InnerProduct
from paceline.policies.batch.noise_scale import NoiseScale
from paceline.policies.batch.norm_test import NormTest
from paceline.policies.batch.protocol import AnyBatch, Batch, Gradients, Size
from paceline.policies.batch.rates import RULES
from paceline.policies.batch.schedule import Schedule
from paceline.policies.batch.wrappers import Bounds, Growth, Hysteresis
from paceline.policies.named import settings_of, value

BATCH: dict[str, type] = {
    "constant": Constant,
    "schedule": Schedule,
    "norm-test": NormTest,
    "inner-product": InnerProduct,
    "augmented": Augmented,
    "noise-scale": NoiseScale,
    "goodput": Goodput,
}
_AROUND: dict[str, tuple[type, ...]] = {
    "constant": (),
    "schedule": (),
    "norm-test": (Bounds,),
    "inner-product": (Growth, Bounds),
    "augmented": (Growth, Bounds),
    "noise-scale": (Hysteresis, Growth, Bounds),
    "goodput": (Hysteresis, Growth, Bounds),
}


def batch_policy(name: str) -> AnyBatch:
    """The batch policy of that name, with the wrappers it is meant for; `noise-scale:c=2,most=4096` carries settings.

    >>> batch_policy("norm-test:eta=0.8,most=2048").most
    2048
    """
    head, _, rest = name.partition(":")
    if head not in BATCH:
        raise unknown_name("batch policy", head, BATCH)
    given = settings_of(rest, "a batch policy", f"{head}:most=4096")
    if head == "schedule":
        return _schedule(given)
    made: AnyBatch = _made(BATCH[head], given)
    for around in _AROUND[head]:
        made = _made(around, given, made)
    if given:
        kinds = (BATCH[head], *_AROUND[head])
        known = sorted({f.name for kind in kinds for f in dataclasses.fields(kind)} - {"inner"})
        raise unknown_name(f"setting of {head}", next(iter(given)), known)
    return made


def _made(kind: type, given: dict[str, str], *inner: AnyBatch) -> Any:
    """One policy or wrapper from the settings that are its own, which are taken out of `given`."""
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name != "inner"}
    return kind(*inner, **{name: value(given.pop(name)) for name in fields if name in given})


def _schedule(given: dict[str, str]) -> Schedule:
    unit = given.pop("unit", "samples")
    try:
        points = tuple((int(begin), int(batch)) for begin, batch in given.items())
    except ValueError:
        raise ConfigError(
            f"a schedule is written begin=batch, as in 'schedule:0=256,50000=512'; got {given!r}"
        ) from None
    return Schedule(points, unit)  # type: ignore[arg-type]


__all__ = [
    "BATCH",
    "RULES",
    "AnyBatch",
    "Augmented",
    "Batch",
    "Bounds",
    "Constant",
    "Goodput",
    "Gradients",
    "Growth",
    "Hysteresis",
    "InnerProduct",
    "NoiseScale",
    "NormTest",
    "Schedule",
    "Size",
    "batch_policy",
]
