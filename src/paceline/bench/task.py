"""What a contender is given to train, and the clock it is timed by.

A contender is one file in `contenders/` with a function `train(task)`. It trains with its own public API, takes its batches
from `task.train`, and calls `task.stepped(module)` after every optimizer step until that returns True:

    def train(task):
        model, loader = ..., DataLoader(task.train, task.batch_size // task.size, collate_fn=as_it_is, ...)
        while True:
            for batch in loader:
                task.loss(model, batch).backward()
                ...
                if task.stepped(model.module):
                    return

Worker 0 keeps the time, in seconds of training. When a test is due it keeps its replica, and so does everybody if the contender
says `task.apart = True` because replicas differ; they are tested after the run (`bench/score.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    """Tensors whose rows belong together; hands out a whole batch at once, so that collating costs nobody anything."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        """The batch of these rows."""
        chosen = torch.tensor(indices, device=self.tensors[0].device)
        return tuple(tensor[chosen] for tensor in self.tensors)

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        return Rows(*(tensor.to(device) for tensor in self.tensors))


def as_it_is(batch: Any) -> Any:
    """The collate function for `Rows`."""
    return batch


class Workload(Protocol):
    """A model, its data, and a target that says when it is trained.

    `target` is reached when `score` is at least (accuracy) or at most (loss) that value, as `higher_is_better` says.
    """

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def batch_size(self) -> int:
        """The global batch, if a suite does not say."""
        ...

    @property
    def target(self) -> float:
        """When it is trained."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Whether the score is an accuracy, not a loss."""
        ...

    def data(self) -> tuple[Rows, Rows]:
        """Rows to train on and rows to test on."""
        ...

    def model(self) -> nn.Module:
        """The untrained model; the caller seeds."""
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer, the same for every contender."""
        ...

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean loss over the batch."""
        ...

    def score(self, model: nn.Module, test: Rows) -> float:
        """Test accuracy or loss."""
        ...


@dataclass
class Task:
    """One run of one contender on one worker.

    Args:
        workload: what to train.
        batch_size: the global batch.
        steps: how many optimizer steps to make.
        test_every: steps between evaluations; 0 means never.
        seed: of weights and order.
        rank: this worker.
        size: how many workers.
        device: where it computes.
        options: the contender's own settings, from the suite.
        marks: JSON-lines file for the time of every step; worker 0 alone.
        train_rows: train on the first so many rows only.
        samples: the run ends when so many were used, whatever the number of steps.
        test_samples: samples between evaluations, instead of steps.
        usual_batch: the suite's batch, where this contender has another one.
    """

    workload: Workload
    batch_size: int
    steps: int
    test_every: int
    seed: int
    rank: int
    size: int
    device: torch.device
    options: dict[str, Any] = field(default_factory=dict)
    marks: Path | None = None
    train_rows: int | None = None
    samples: int | None = None
    test_samples: int | None = None
    usual_batch: int = 0

    def __post_init__(self) -> None:
        train, _ = self.workload.data()
        if self.train_rows is not None:
            train = Rows(*(tensor[: self.train_rows] for tensor in train.tensors))
        self.train = train.to(self.device)
        self._file = self.marks.open("a", encoding="utf-8") if self.marks and self.rank == 0 else None
        self.apart = False
        self.usual_batch = self.usual_batch or self.batch_size
        self._used = 0
        self._step, self._train_s = 0, 0.0
        self._since: float | None = None

    def model(self) -> nn.Module:
        """The untrained model on this worker's device, the same everywhere."""
        torch.manual_seed(self.seed)
        return self.workload.model().to(self.device)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The workload's optimizer."""
        return self.workload.optimizer(parameters)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean loss over the batch; in bf16 autocast on a GPU."""
        with torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext():
            return self.workload.loss(model, batch)

    def stepped(self, module: nn.Module, samples: int | None = None) -> bool:
        """A step has ended: note the time, keep the replica when a test is due. True when the run is over.

        Args:
            module: the plain model, without what the contender wraps it in.
            samples: used so far by all workers, where the batch changes.
        """
        before, self._used = self._used, samples if samples is not None else self._used + self.batch_size
        over = self._used >= self.samples if self.samples else self._step + 1 >= self.steps
        if self.test_samples:
            testing = over or self._used // self.test_samples > before // self.test_samples
        else:
            testing = bool(self.test_every) and (over or (self._step + 1) % self.test_every == 0)
        if testing and self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._since is not None:  # the first step is the contender's to warm up
            self._train_s += now - self._since
        self._step += 1
        self._write({"step": self._step, "train_s": self._train_s, "samples": self._used})
        if testing and self.marks and (self.rank == 0 or self.apart):
            path = self.marks.parent / f"replica-{self._step}-{self.rank}.pt"
            torch.save({name: value.cpu() for name, value in module.state_dict().items()}, path)
        if over and self._file is not None:
            self._file.close()
        self._since = time.perf_counter()
        return over

    def _write(self, record: dict[str, float]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
