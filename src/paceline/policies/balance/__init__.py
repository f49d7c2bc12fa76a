"""How much of each global batch does each worker take? One method, one file; `policy` finds them by name.

| name | decides | gradients | exact |
|---|---|---|---|
| `affine` (default) | every few steps, optimal for t = c + a*b, with a dead-band | b_i / B | yes |
| `equal` | never | b_i / B | yes |
| `fixed:1,2,4` | never, shares by hand | b_i / B | yes |
| `dbs` | once per epoch, by the published rule on wall time | b_i / B | yes |
| `edp` | once per epoch, by the published rule on compute time | b_i / B | yes |
| `dp` | as `edp` | plain mean | no |
"""

from __future__ import annotations

from paceline.errors import ConfigError, unknown_name
from paceline.policies.balance.affine import Affine
from paceline.policies.balance.dbs import DBS
from paceline.policies.balance.dp import DP
from paceline.policies.balance.edp import EDP
from paceline.policies.balance.equal import Equal
from paceline.policies.balance.fixed import Fixed
from paceline.policies.balance.protocol import AnyBalance, Balance
from paceline.policies.balance.wrappers import Bounds, DeadBand, EveryNSteps, Smooth

BALANCE: dict[str, AnyBalance] = {
    "affine": DeadBand(Affine()),
    "equal": Equal(),
    "dbs": DBS,
    "dp": DP,
    "edp": EDP,
}


def policy(name: str) -> AnyBalance:
    """The balance policy of that name; `fixed:1,2,4` carries its shares.

    >>> policy("fixed:1,3").shares
    (1.0, 3.0)
    """
    head, _, rest = name.partition(":")
    if head == "fixed":
        try:
            return Fixed(tuple(float(part) for part in rest.split(",")))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"fixed takes one share per worker, as in 'fixed:1,2,4', got {name!r}") from None
    if name not in BALANCE:
        raise unknown_name("balance policy", name, [*BALANCE, "fixed"])
    return BALANCE[name]


__all__ = [
    "BALANCE",
    "DBS",
    "DP",
    "EDP",
    "Affine",
    "AnyBalance",
    "Balance",
    "Bounds",
    "DeadBand",
    "Equal",
    "EveryNSteps",
    "Fixed",
    "Smooth",
    "policy",
]
