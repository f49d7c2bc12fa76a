"""The learning rate when the batch changes, and schedulers that count samples."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.events import EventLog
from paceline.policies.batch.rates import factor
from paceline.runtime.loader import Loader


class Rates:
    """Multiplies the learning rate by the rule's factor while the optimizer makes its step, and puts it back after it.

    So any scheduler, and whoever else reads or sets the rate, sees the one that was chosen for the first batch.

    Args:
        rule: of `policies/batch/rates.py`.
        log: where changes go.

    Attributes:
        factor: what the learning rate is multiplied by now.
    """

    def __init__(self, rule: str, log: EventLog) -> None:
        self._rule, self._log = rule, log
        self._first = self._batch = 0
        self.factor = 1.0
        self._kept: list[Any] = []

    def begin(self, batch: int) -> None:
        """The batch the learning rate was chosen for."""
        self._first = self._batch = batch

    def attach(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Hook into an optimizer; returns the handles."""
        return [
            optimizer.register_step_pre_hook(self._raise),
            optimizer.register_step_post_hook(lambda optimizer, *_: self._lower(optimizer)),
        ]

    def follow(self, step: int, batch: int, noise: float | None) -> None:
        """The batch from this step on."""
        if batch == self._batch or self._rule == "none":
            return
        self._batch, self.factor = batch, factor(self._rule, self._first, batch, noise)
        self._log.write(
            "lr", step=step, rule=self._rule, factor=self.factor, batch=batch, first=self._first, noise=noise
        )

    def state(self) -> dict[str, float]:
        """What a resume needs: `adascale` looked at the noise of its time."""
        return {"batch": self._batch, "factor": self.factor}

    def load(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self._batch, self.factor = int(state["batch"]), float(state["factor"])

    def _raise(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._lower(optimizer)  # of a step that ended in an error
        if self.factor != 1.0:
            for group in optimizer.param_groups:
                self._kept.append(group["lr"])
                group["lr"] = group["lr"] * self.factor

    def _lower(self, optimizer: torch.optim.Optimizer) -> None:
        kept, self._kept = self._kept, []
        for group, lr in zip(optimizer.param_groups, kept, strict=False):
            group["lr"] = lr


class BySamples:
    """A torch scheduler that goes on by samples, not by steps: call `step()` after every optimizer step as ever.

    Args:
        scheduler: any scheduler with `step()`.
        loader: counts the samples.
        every: samples to one step of the scheduler; as a rule the batch its settings were made for.

    Example:
        scheduler = paceline.BySamples(CosineAnnealingLR(optimizer, 1000), loader, every=256)
    """

    def __init__(self, scheduler: Any, loader: Loader, every: int) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"every must be a whole number of samples, at least 1; got {every!r}")
        self.scheduler, self._loader, self._every = scheduler, loader, every
        self._done = loader.samples // every

    def step(self) -> None:
        """As many steps as whole `every` samples have passed since the last call."""
        while self._done < self._loader.samples // self._every:
            self._done += 1
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and how far it has come."""
        return {"scheduler": self.scheduler.state_dict(), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.scheduler.load_state_dict(state["scheduler"])
        self._done = state["done"]
