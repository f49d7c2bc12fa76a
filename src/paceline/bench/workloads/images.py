"""Images: a small convolutional net and ResNet-18, on scikit-learn's digits and on Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.bench.task import Rows


def cnn(side: int, width: int = 64) -> nn.Module:
    """Two convolutions and two layers, the first of them with `width` units."""
    small = -(-side // 4)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * small * small, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions with a way around them (He et al. 2016, figure 2)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_first, self.norm_second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        same = stride == 1 and before == width
        self.around = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both ways."""
        inner = F.relu(self.norm_first(self.first(x)))
        return F.relu(self.norm_second(self.second(inner)) + self.around(x))


def resnet18(channels: int = 1) -> nn.Module:
    """ResNet-18 in the form for small images: a 3x3 stem and no pooling before the blocks; 11.2 million parameters."""
    blocks: list[nn.Module] = []
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Residual(before, width, stride), Residual(width, width, 1)]
        before = width
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@dataclass(frozen=True)
class Images:
    """Classification into ten classes; the target is a test accuracy."""

    name: str
    load: Callable[[], tuple[Rows, Rows]]
    net: Callable[[], nn.Module]
    batch_size: int
    target: float
    lr: float = 0.1
    higher_is_better: bool = True

    def data(self) -> tuple[Rows, Rows]:
        """Images and labels."""
        return self.load()

    def model(self) -> nn.Module:
        """The net."""
        return self.net()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Cross entropy."""
        x, y = batch
        return F.cross_entropy(model(x), y)

    def score(self, model: nn.Module, test: Rows) -> float:
        """Share of test images classified right."""
        x, y = test.tensors
        correct = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
        return correct / len(test)
