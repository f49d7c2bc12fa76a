"""The `paced` mechanism: a worker that takes as long as its cluster file says.

Real arithmetic runs; the rest of the time is slept before the gradients leave. It is injected around
DistributedDataParallel from outside, so any script is paced, plain DDP and other libraries included, and nothing in the
product knows about it.

On a cluster of another mechanism nothing is slept and only the record is kept.

A step begins when DDP's forward begins. Hooks on the parameters fire before DDP's own: at the first gradient the worker sleeps
until what its backward usually still needs is left, so that the first bucket does not leave early; at the last gradient it
sleeps the rest, so that the whole is exact.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.lab.cluster import Cluster


class Pacer:
    """Paces the training steps of this process and keeps a record of them.

    Args:
        cluster: what to emulate.
        worker: which worker of it this process is.
        log: JSON-lines file for the record.
        most_steps: end the process, as done, when that many steps have been made.
    """

    def __init__(self, cluster: Cluster, worker: int, log: Path, *, most_steps: int | None = None) -> None:
        self._cluster, self._worker = cluster, worker
        self._sleeps, self._most_steps = cluster.mechanism == "paced", most_steps
        self._exchange_s = 0.0
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("a", encoding="utf-8")
        self._first: float | None = None
        self._step = -1
        self._begun = self._due = 0.0
        self._samples = 0
        self._owed = False
        self._expected = 0
        self._count = 0
        self._real_tail_s = 0.0
        self._first_gradient = 0.0

    def install(self) -> None:
        """Pace every DistributedDataParallel made from now on."""
        original = DistributedDataParallel.__init__
        pacer = self

        def paced_init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            pacer.attach(self)

        DistributedDataParallel.__init__ = paced_init

    def attach(self, ddp: Any) -> None:
        """Pace one model."""
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._expected = len(parameters)
        if self._cluster.paced_links:
            self._exchange_s = self._cluster.exchange_s(sum(parameter.nbytes for parameter in parameters))
        ddp.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._after_gradient)

    def _before_forward(self, ddp: Any, args: Any, kwargs: Any) -> None:
        if not (torch.is_grad_enabled() and ddp.training):
            return
        self._pay(self._due)  # a micro-batch under no_sync, or unused parameters: nothing left, so pay now
        now = time.perf_counter()
        self._first = now if self._first is None else self._first
        self._step += 1
        if self._most_steps is not None and self._step >= self._most_steps:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            raise SystemExit(0)
        self._samples = _samples(args) or _samples(list(kwargs.values()))
        self._begun = now
        self._due = now
        if self._sleeps:
            self._due += self._exchange_s + self._cluster.step_s(
                self._worker, self._samples, self._step, now - self._first
            )
        self._owed, self._count = True, 0

    def _after_gradient(self, _: torch.Tensor) -> None:
        if not self._owed:
            return
        self._count += 1
        if self._count == 1:
            self._sleep_until(self._due - self._real_tail_s)
            self._first_gradient = time.perf_counter()
        if self._count == self._expected:
            tail = time.perf_counter() - self._first_gradient
            self._real_tail_s = tail if self._step == 0 else 0.7 * self._real_tail_s + 0.3 * tail
            self._pay(self._due)

    def _pay(self, due: float) -> None:
        if self._owed:
            if 0 < self._count < self._expected:
                self._expected = self._count  # parameters that this model does not use
            self._owed = False
            real = time.perf_counter() - self._begun
            self._sleep_until(due if self._sleeps else time.perf_counter() + self._exchange_s)
            now = time.perf_counter()
            record = {
                "step": self._step,
                "samples": self._samples,
                "due_s": due - self._begun,
                "real_s": real,
                "took_s": now - self._begun,
                "at": now,
                "elapsed_s": self._begun - (self._first or 0.0),
            }
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()

    @staticmethod
    def _sleep_until(moment: float) -> None:
        left = moment - time.perf_counter()
        if left > 0:
            time.sleep(left)


def _samples(values: Any) -> int:
    """Length of the first tensor among positional arguments."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
        if isinstance(value, (list, tuple)):
            found = _samples(value)
            if found:
                return found
        if isinstance(value, dict):
            found = _samples(list(value.values()))
            if found:
                return found
    return 0
