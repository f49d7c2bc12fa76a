"""A small GPT that reads Python's language reference letter by letter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.bench.task import Rows
from paceline.bench.workloads.data import text

LETTERS = 128


class Block(nn.Module):
    """Attention, then two layers, each with a way around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every letter looks at those before it."""
        batch, length, width = x.shape
        parts = self.look(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.after(x))


class Net(nn.Module):
    """Embedding, blocks, and the embedding once more as the output."""

    def __init__(self, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(LETTERS, width), nn.Embedding(context, width)
        nn.init.normal_(self.letter.weight, std=0.3)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, LETTERS, bias=False)
        self.out.weight = self.letter.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next letter."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.out(self.norm(self.blocks(self.letter(x) + self.place(places))))


@dataclass(frozen=True)
class Gpt:
    """Next-letter prediction; the target is a test loss in nats per letter."""

    name: str = "gpt-text"
    batch_size: int = 64
    target: float = 2.65
    context: int = 32
    higher_is_better: bool = False

    def data(self) -> tuple[Rows, Rows]:
        """Pieces of text and the letters that follow."""
        train, test, letters = text(self.context)
        assert letters <= LETTERS
        return train, test

    def model(self) -> nn.Module:
        """Two blocks of width 64."""
        return Net(self.context, 64, 2, 4)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=3e-3)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Cross entropy, per letter."""
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def score(self, model: nn.Module, test: Rows) -> float:
        """Test loss."""
        return float(self.loss(model, test.__getitems__(list(range(min(512, len(test)))))))
