"""What is trained, by name; each with a target that says when it is trained."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.errors import unknown_name

if TYPE_CHECKING:
    from paceline.bench.task import Workload

NAMES = (
    "cnn-digits",
    "cnn-fashion",
    "cnn-wide-fashion",
    "resnet18-digits",
    "resnet18-fashion",
    "resnet18-fashion32",
    "gpt-text",
    "mlp-fixed",
)


def check(name: str) -> str:
    """The name, if there is such a workload; without loading torch."""
    if name not in NAMES:
        raise unknown_name("workload", name, NAMES)
    return name


def workload(name: str) -> Workload:
    """A workload by name."""
    from torch import nn

    from paceline.bench.workloads.data import digits, fashion
    from paceline.bench.workloads.gpt import Gpt
    from paceline.bench.workloads.images import Images, cnn, resnet18

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    known: dict[str, Workload] = {
        "cnn-digits": Images("cnn-digits", digits, partial(cnn, 8), 128, 0.95),
        "cnn-fashion": Images("cnn-fashion", fashion, partial(cnn, 28), 256, 0.78, lr=0.05),
        "cnn-wide-fashion": Images("cnn-wide-fashion", fashion, partial(cnn, 28, 512), 128, 0.8, lr=0.05),
        "resnet18-digits": Images("resnet18-digits", digits, resnet18, 64, 0.95, lr=0.05),
        "resnet18-fashion": Images("resnet18-fashion", fashion, resnet18, 256, 0.85),
        "resnet18-fashion32": Images("resnet18-fashion32", partial(fashion, 32), partial(resnet18, 1), 2048, 0.88),
        "gpt-text": Gpt(),
        "mlp-fixed": Images("mlp-fixed", digits, mlp, 128, 0.9),
    }
    return known[check(name)]
