"""Data-parallel PyTorch training that runs at the speed of all your machines together.

    pace = paceline.init()
    model = pace.wrap(model, optimizer)
    loader = pace.loader(dataset, batch_size=512)

Names are imported when first used, so that `import paceline` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.comm import Fault, LoopbackWorld, TorchComm
    from paceline.errors import (
        CheckpointError,
        ConfigError,
        DisagreementError,
        NonFiniteError,
        PacelineError,
        PeerError,
        PeerLost,
        PeerTimeout,
    )
    from paceline.policies.balance import policy
    from paceline.runtime.hook import WeightedSum
    from paceline.runtime.loader import Loader
    from paceline.runtime.meter import Meter, StepTimes
    from paceline.runtime.pace import Pace, init
    from paceline.runtime.rates import BySamples
    from paceline.runtime.sampler import PlanSampler
    from paceline.shards import ShardPlan, partition

_HOME = {
    "BySamples": "runtime.rates",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DisagreementError": "errors",
    "Fault": "comm",
    "Loader": "runtime.loader",
    "LoopbackWorld": "comm",
    "Meter": "runtime.meter",
    "NonFiniteError": "errors",
    "Pace": "runtime.pace",
    "PacelineError": "errors",
    "PeerError": "errors",
    "PeerLost": "errors",
    "PeerTimeout": "errors",
    "PlanSampler": "runtime.sampler",
    "ShardPlan": "shards",
    "StepTimes": "runtime.meter",
    "TorchComm": "comm",
    "WeightedSum": "runtime.hook",
    "init": "runtime.pace",
    "partition": "shards",
    "policy": "policies.balance",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(f"paceline.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)


__all__ = [
    "BySamples",
    "CheckpointError",
    "ConfigError",
    "DisagreementError",
    "Fault",
    "Loader",
    "LoopbackWorld",
    "Meter",
    "NonFiniteError",
    "Pace",
    "PacelineError",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "PlanSampler",
    "ShardPlan",
    "StepTimes",
    "TorchComm",
    "WeightedSum",
    "init",
    "partition",
    "policy",
]
