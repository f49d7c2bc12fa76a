"""What becomes of the learning rate when the batch changes? A factor, by a rule the user has chosen.

| rule | factor for a batch B, when the rate was chosen for B0 |
|---|---|
| `none` | 1 |
| `linear` | B / B0 (Goyal et al. 2017): for SGD, while B is below the noise scale |
| `sqrt` | sqrt(B / B0): for Adam (Malladi et al. 2022) |
| `adascale` | (1 + Bn / B0) / (1 + Bn / B): linear far below the noise scale Bn, flat above it (Johnson et al. 2020) |
"""

from __future__ import annotations

import math

from paceline.errors import unknown_name

RULES = ("none", "linear", "sqrt", "adascale")


def check_rule(rule: str) -> None:
    """Refuse a rule that does not exist."""
    if rule not in RULES:
        raise unknown_name("learning-rate rule", rule, RULES)


def factor(rule: str, first: int, now: int, noise: float | None) -> float:
    """What the learning rate is multiplied by.

    >>> factor("linear", 64, 128, None), round(factor("adascale", 64, 128, 128.0), 2)
    (2.0, 1.5)
    """
    if rule == "linear":
        return now / first
    if rule == "sqrt":
        return math.sqrt(now / first)
    if rule == "adascale" and noise is not None:
        return now / first if math.isinf(noise) else (1.0 + noise / first) / (1.0 + noise / now)
    return 1.0
