"""`paceline.init` and what it returns: the thin shell that ties the parts together."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.comm import Comm, TorchComm, pick_device
from paceline.config import PLACES, Settings, resolve
from paceline.errors import CheckpointError, ConfigError
from paceline.events import SCHEMA, EventLog, events_path
from paceline.policies.balance import AnyBalance
from paceline.policies.balance.shares import split_by_shares
from paceline.policies.batch import AnyBatch
from paceline.policies.sync import Gossip, Sync
from paceline.process import NODE, die_with_launcher
from paceline.runtime import checkpoint, features, randomness
from paceline.runtime.batches import num_samples
from paceline.runtime.dissimilarity import dissimilarity
from paceline.runtime.evaluate import evaluate
from paceline.runtime.flat import Flat
from paceline.runtime.gossip import GossipRounds
from paceline.runtime.handshake import agree
from paceline.runtime.hook import WeightedSum
from paceline.runtime.loader import Loader
from paceline.runtime.losses import Losses
from paceline.runtime.memory import explain, is_out_of_memory
from paceline.runtime.meter import Meter
from paceline.runtime.model import PacedModel, wrap
from paceline.runtime.rates import Rates
from paceline.runtime.replicas import Replicas
from paceline.runtime.rounds import Rounds, check
from paceline.runtime.step import StepRunner
from paceline.runtime.topology import by_label, declared
from paceline.runtime.track import sinks
from paceline.shards import Moves, ShardPlan
from paceline.types import Limits

STATE_SCHEMA = 2
BATCH_NORM_LEAST = 8  # samples; below it the error rises steeply (Wu and He 2018, figure 1)
SAVING = "saving, which every worker must take part in"


def init(
    *,
    balance: str | AnyBalance | None = None,
    sync: str | Sync | None = None,
    batch: str | AnyBatch | None = None,
    lr_rule: str | None = None,
    recipe: str | None = None,
    nodes: str | Sequence[Sequence[int]] | None = None,
    seed: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    log_mb: int | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    track: str | None = None,
    replan_every: int | None = None,
    max_local_batch: int | tuple[int | None, ...] | list[int | None] | None = None,
    min_local_batch: int | None = None,
    granularity: int | None = None,
    timeout_s: float | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
) -> Pace:
    """Join the world torchrun (or `paceline run`) started; alone, be a world of one.

    Arguments left out come from the command line, a file or the environment; see `paceline.config`.

    Args:
        balance: name of a balance policy ("affine", "equal", "fixed:1,2", "dbs", "dp", "edp"), or the policy itself.
        sync: name of a sync policy ("allreduce", "local", "post-local", "hierarchical", "daso", "overlap", "diloco", "gossip"), with
            settings after a colon ("overlap:h=8,compress=int8"), or the policy itself.
        batch: name of a batch policy ("constant", "schedule", "norm-test", "inner-product", "augmented", "noise-scale", "goodput"), with
            settings after a colon ("goodput:most=4096"), or the policy itself.
        lr_rule: what becomes of the learning rate when the batch changes: "none", "linear", "sqrt", "adascale".
        recipe: a published method of several policies ("adaptive-local", "rcd-sgd"); stands in for settings that nobody gave.
        nodes: which workers are on which node: "2,2", or lists of workers; by default by the names of hosts.
        seed: decides the order of samples.
        run_dir: folder for the event log; none is kept without.
        log_mb: most megabytes that a worker's events may take.
        tensorboard: folder for TensorBoard scalars, as the run goes on.
        track: "wandb", "mlflow" or both with a comma between: told the same scalars.
        replan_every: steps between two decisions.
        max_local_batch: most samples a worker can hold: one number, or one per worker.
        min_local_batch: fewest samples a worker takes while the batch reaches for all.
        granularity: plan in multiples of this many samples.
        timeout_s: longest wait for another worker.
        device: this worker's device; by default its GPU, or the CPU.
        backend: "nccl" or "gloo"; by default what all workers can use.
    """
    explicit = {name: value for name, value in locals().items() if value is not None}
    for name in ("run_dir", "tensorboard", "device"):
        if name in explicit:
            explicit[name] = str(explicit[name])
    settings, sources = resolve(explicit, os.environ, Path.cwd())
    die_with_launcher()
    chosen = pick_device(settings.device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return Pace(TorchComm(chosen, settings.backend, settings.timeout_s), settings, chosen, sources)


class Pace:
    """One worker of a run. Made by `paceline.init`.

    Args:
        comm: the door to the other workers.
        settings: the resolved settings.
        device: where this worker computes.
        sources: where each setting came from, for the record.
        meter: another meter, for tests.
    """

    def __init__(
        self,
        comm: Comm,
        settings: Settings,
        device: torch.device,
        sources: Mapping[str, str] | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.comm, self.settings, self.device = comm, settings, device
        self._sources = dict(sources or {})
        self._log = EventLog(None)
        self._closed = False
        self._failed = False
        self._model: PacedModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._loader: Loader | None = None
        self._runner: StepRunner | None = None
        self._rounds: Replicas | None = None
        self._updated_step = -1
        self._hooks: list[Any] = []
        self._meter = meter or Meter(device)
        self._total = WeightedSum(comm, self._meter)
        self._watch_exit()
        shared = {name: value for name, value in settings.plain().items() if name not in PLACES}
        versions = _versions()
        agree(comm, "settings", shared)
        label = os.environ.get(NODE) or getattr(comm, "host", "")
        others = agree(
            comm,
            "version of paceline",
            {
                "paceline": versions["paceline"],
                "_all": versions,
                "_node": label,
                "_host": getattr(comm, "host", ""),
                "_now": time.time(),
            },
        )
        if settings.nodes is not None:
            self.topology = declared(settings.nodes, comm.size)
        else:
            self.topology = by_label([other["_node"] for other in others])
        told, problem = [], ""
        if comm.rank == 0:
            try:
                told = sinks(settings.tensorboard, settings.track, settings.plain())
            except ConfigError as error:
                problem = str(error)
        if settings.tensorboard or settings.track:
            problem = comm.gather_text(problem, "starting trackers")[0]
            if problem:
                raise ConfigError(problem)
        if settings.run_dir is not None or told:
            path = None if settings.run_dir is None else events_path(Path(settings.run_dir), comm.rank)
            hosts = [other["_host"] for other in others]
            tells = comm.rank <= 1 or hosts.index(hosts[comm.rank]) == comm.rank
            self._log = EventLog(path, most_bytes=settings.log_mb * 2**20, sinks=told, tells=tells)
        self._losses = Losses(comm, self._log)
        self._rates = Rates(settings.lr_rule, self._log)
        self._log.write(
            "start",
            schema=SCHEMA,
            rank=comm.rank,
            size=comm.size,
            attempt=max(other["_now"] for other in others),
            policies=settings.policies(),
            host=getattr(comm, "host", ""),
            pid=os.getpid(),
            device=str(device),
            backend=getattr(comm, "backend", ""),
            versions=versions,
            config=settings.plain(),
            sources=self._sources,
        )
        self._log.write("topology", names=self.topology.names, members=self.topology.members)
        if comm.rank == 0 and settings.sync_policy.name != "allreduce":
            sys.stderr.write(f"paceline: {self.topology}; sync {settings.sync_policy.name}\n")
        for rank, other in enumerate(others):
            if other["_all"] != versions:
                self._log.write("note", text=f"worker {rank} runs other versions: {other['_all']}")

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self.comm.size

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, the one that prints."""
        return self.comm.rank == 0

    def wrap(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        compress: str | None = None,
        **ddp: Any,
    ) -> PacedModel:
        """DistributedDataParallel with gradients summed by share; the loop around it stays as it is.

        Args:
            model: on `pace.device`.
            optimizer: the model's; its steps are timed, and it is saved with the model.
            compress: "bf16" sends half the bytes: gradients are rounded on the wire and summed in fp32, and what rounding
                took is made good in later steps. Single updates are then no longer exact. Over gloo only.
            ddp: further arguments of DistributedDataParallel (`find_unused_parameters=True`, ...).
        """
        if self.settings.lr_rule != "none" and optimizer is None:
            raise ConfigError(
                f"lr_rule={self.settings.lr_rule!r} acts on the optimizer's steps: call pace.wrap(model, optimizer) with it"
            )
        if self._model is not None:
            raise ConfigError("pace.wrap was called before: one model per pace. Put several networks into one module")
        policy = self.settings.sync_policy
        if policy.name != "allreduce":
            check(policy, model, optimizer, compress, ddp)
        self._model = wrap(model, self.comm, self._total, self.device, compress, **ddp)
        if policy.name != "allreduce" and self.size > 1 and optimizer is not None:
            if isinstance(policy, Gossip):
                self._rounds = GossipRounds(policy, self.comm, model, optimizer, self._total, self._log)
            else:
                self._rounds = Rounds(policy, self.comm, self.topology, model, optimizer, self._total, self._log)
            self._join_rounds()
        if optimizer is not None:
            self._optimizer = optimizer
            if self.settings.lr_rule != "none":
                self._hooks += self._rates.attach(optimizer)
            self._hooks.append(optimizer.register_step_post_hook(self._after_update))
        return self._model

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        if getattr(optimizer, "found_inf", None) is None:  # a fused optimizer under GradScaler skips by itself
            self._meter.updated()
        self._after_step()

    def _after_step(self) -> None:
        self._updated_step = self._total.step
        if self._rounds is not None:
            epoch, ends = (self._loader.epoch, self._loader.ends_epoch) if self._loader is not None else (0, False)
            loss = partial(self._losses.close_over_all, epoch, self._total.step)
            following = self._loader.next_ends_epoch if self._loader is not None else lambda: False
            self._rounds.after_step(epoch, ends_epoch=ends, loss=loss, next_ends_epoch=following)
            self._meter.agreed()

    def _after_batch(self) -> None:
        """The loop is done with a batch."""
        self._catch_up()
        if self._rounds is None and self._loader is not None and self._loader.ends_epoch:
            self._losses.close(self._loader.epoch, self._total.step)

    def _catch_up(self) -> None:
        """A worker whose GradScaler skipped the optimizer must keep step with the others all the same."""
        skipped = self._total.backward_step == self._total.step != self._updated_step
        if self._rounds is not None and self._loader is not None and self._loader.ends_update and skipped:
            self._after_step()

    def report(self, loss: torch.Tensor | float) -> None:
        """Tell the training loss of the batch under way (this worker's mean); it may stay on the device.

        Its mean goes to the event log at the end of the epoch, and `daso` looks at it to change its pace.
        """
        self._losses.add(loss, self._total.samples)

    def settle(self) -> None:
        """Make all replicas equal now: take in what is under way, then average. Collective; nothing to do for `allreduce`."""
        self._catch_up()
        if self._rounds is not None:
            self._rounds.settle()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds what all replicas agreed on last (the anchor); the same values on every worker."""
        self._catch_up()
        if self._rounds is None:
            yield
        else:
            with self._rounds.consensus():
                yield

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        sampler: Any = None,
        drop_last: bool = False,
        accumulate: int = 1,
        partition: ShardPlan | None = None,
        moved: Callable[[ShardPlan, Moves], None] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        **dataloader: Any,
    ) -> Loader:
        """This worker's share of each global batch, following its speed, on `pace.device`.

        Args:
            dataset: map-style, the whole of it, the same on every worker.
            batch_size: the GLOBAL batch, over all workers.
            shuffle: a new permutation each epoch, from the seed; else the dataset's order.
            sampler: an order of your own: an iterable of indices, the same on every worker.
            drop_last: leave out the short last batch of an epoch.
            accumulate: batches per optimizer step, if gradients are accumulated; plans change between steps only.
            partition: a plan of `paceline.partition`: worker i trains on shard i alone. When speeds change, as few samples as possible
                change hands between epochs; worker 0's plan needs its features for that.
            moved: called with the new plan and what moved, on every worker, so that files can be copied.
            num_workers: loader processes.
            prefetch_factor: batches each of them prepares ahead (2 by default).
            dataloader: further arguments of DataLoader (`collate_fn`, `pin_memory`, ...).
        """
        if self._loader is not None:
            raise ConfigError(
                "pace.loader was called before: one training loader per pace. Use pace.evaluate for others"
            )
        self._loader = Loader(
            dataset,
            batch_size,
            comm=self.comm,
            settings=self._loader_settings(batch_size),
            total=self._total,
            meter=self._meter,
            log=self._log,
            device=self.device,
            shuffle=shuffle,
            sampler=sampler,
            drop_last=drop_last,
            accumulate=accumulate,
            partition=partition,
            moved=moved,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            **dataloader,
        )
        self._loader.after_batch = self._after_batch
        policy = self.settings.batch_policy
        self._total.measures = policy.needs
        self._join_rounds()
        self._rates.begin(batch_size)
        sizing = self._loader.coordinator.sizing
        self._loader.before_batch = lambda step, size: self._rates.follow(step, size, sizing.noise)
        return self._loader

    def _join_rounds(self) -> None:
        """Loader and rounds of local training learn of each other, whichever was made first."""
        if self._rounds is None or self._loader is None:
            return
        policy = self.settings.batch_policy
        self._loader.coordinator.lag = self.settings.replan_every
        if policy.needs != "nothing":
            self._rounds.probe(policy.at == "last", self._loader.coordinator.resize)

    def _loader_settings(self, batch_size: int) -> Settings:
        """The settings, with a least share where the model's batch normalisation needs one and nobody says otherwise."""
        settings, cap = self.settings, self.settings.max_local_batch
        caps = [one for one in (cap if isinstance(cap, (list, tuple)) else [cap]) if one is not None]
        least = min(BATCH_NORM_LEAST, max(2, batch_size // (2 * self.comm.size)), *caps)
        if self._model is None or not self._model.needs_several or "min_local_batch" in self._sources or least < 2:
            return settings
        self._log.write("note", text=f"min_local_batch is {least}: batch normalisation trains badly on fewer samples")
        return dataclasses.replace(settings, min_local_batch=least)

    def step(self, fn: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        """Forward and backward as one function, surviving out of memory; then call `optimizer.step()` as usual.

        Gradients are computed afresh: what was in `.grad` is dropped.

        Args:
            fn: batch -> mean loss over that batch. It may be called several times, on parts of the batch.
            batch: as the loader gave it.

        Returns:
            The mean loss over this worker's share.
        """
        if self._model is None:
            raise ConfigError("pace.step needs a wrapped model: call pace.wrap(model, optimizer) first")
        if self._runner is None:
            cap = None
            if self._loader is not None:
                cap = self._loader.cap
                self._loader.coordinator.micro = True
            self._runner = StepRunner(self._model, self._total, self._recovered, cap)
        return self._runner.run(fn, batch, self._total.samples or num_samples(batch))

    def _recovered(self, samples: int, fits: int, micro_batches: int) -> None:
        if self._loader is not None:
            self._loader.coordinator.learned_cap = min(self._loader.coordinator.learned_cap, fits)
        self._log.write("memory", step=self._total.step, samples=samples, fits=fits, micro_batches=micro_batches)

    def evaluate(
        self, fn: Callable[[Any], Mapping[str, Any]], dataset: Any, batch_size: int = 256, **dataloader: Any
    ) -> dict[str, float]:
        """Sum what `fn` returns for each batch over the whole dataset, each sample once, over all workers.

        The wrapped model is in eval mode meanwhile, and gradients are off. Where replicas differ (`sync`), the model is what they
        agreed on last.

        Args:
            fn: batch -> sums over its samples by name, e.g. {"correct": 31, "loss": 12.5}.
            dataset: map-style, the whole of it, the same on every worker.
            batch_size: samples per call of `fn`, on one worker.
            dataloader: further arguments of DataLoader.

        Returns:
            The sums, and `count` == len(dataset).
        """
        split = self._division(len(dataset))
        with self.consensus():
            totals = evaluate(
                fn,
                dataset,
                comm=self.comm,
                model=self._model,
                device=self.device,
                split=split,
                batch_size=batch_size,
                **dataloader,
            )
        self._log.write("evaluate", step=self._loader.step if self._loader else 0, **totals)
        return totals

    def _division(self, length: int) -> tuple[int, ...]:
        """So many samples over the workers, by speed."""
        self._catch_up()
        shares = (1.0,) * self.size
        if self._loader is not None:
            shares = tuple(max(float(samples), 0.5) for samples in self._loader.split)
        return split_by_shares(shares, length, Limits.of(self.size))

    def features(
        self, dataset: Any, fn: Callable[[Any], torch.Tensor] | None = None, batch_size: int = 256, **dataloader: Any
    ) -> NDArray[np.float32] | None:
        """A row of features for every sample, computed by all workers; a matrix on worker 0, None elsewhere. Collective.

        Args:
            dataset: map-style, the whole of it, the same on every worker.
            fn: batch -> a row per sample; by default what goes into the wrapped model's last linear layer.
            batch_size: samples per call on one worker.
            dataloader: further arguments of DataLoader.
        """
        split = self._division(len(dataset))
        with self.consensus():
            return features.collect(
                dataset,
                fn,
                comm=self.comm,
                model=self._model,
                device=self.device,
                split=split,
                batch_size=batch_size,
                **dataloader,
            )

    def partition(
        self,
        matrix: Any,
        labels: Any = None,
        *,
        speeds: Sequence[float] | None = None,
        method: str = "auto",
        refine_s: float = 0.0,
        columns: int | None = None,
    ) -> ShardPlan:
        """`paceline.partition` on worker 0, with the plan on every worker. Collective.

        Args:
            matrix: features, on worker 0; ignored elsewhere.
            labels: on worker 0.
            speeds: one per worker; equal if left out. What workers turn out to do moves shards between epochs.
            method: of `paceline.partition`.
            refine_s: seconds to spend on swaps.
            columns: look at so many principal components only; for raw inputs.
        """
        found = list(speeds) if speeds is not None else [1] * self.size
        if len(found) != self.size:
            raise ConfigError(f"speeds must be one per worker: got {len(found)} for {self.size} workers")
        settings = {"method": method, "seed": self.settings.seed, "refine_s": refine_s, "columns": columns}
        return features.shared_partition(self.comm, matrix, labels, found, settings)

    def dissimilarity(
        self, fn: Callable[[Any], torch.Tensor], dataset: Any = None, batch_size: int = 256, **dataloader: Any
    ) -> dict[str, float]:
        """How far the gradients of workers' samples lie apart, at what replicas agree on. Collective; also an event.

        Args:
            fn: batch -> mean loss over it, through the wrapped model.
            dataset: this worker's samples; by default its shard of the loader's dataset.
            batch_size: samples per call of `fn`.
            dataloader: further arguments of DataLoader.

        Returns:
            `zeta2` = sum_p w_p |grad F_p - grad F|^2, `square` = |grad F|^2, and their `ratio`.
        """
        if self._model is None:
            raise ConfigError("gradients come from the wrapped model: call pace.wrap first")
        if dataset is None:
            if self._loader is None or self._loader.shards is None:
                raise ConfigError("without shards there is nothing to compare: give this worker's samples as dataset=")
            dataset = self._loader.owned()
        with self.consensus():
            found = dissimilarity(
                fn,
                dataset,
                comm=self.comm,
                model=self._model,
                total=self._total,
                device=self.device,
                batch_size=batch_size,
                **dataloader,
            )
        self._log.write("dissimilarity", step=self._loader.step if self._loader else 0, **found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs: model, optimizer, place in the data, learned speeds, random states.

        Collective: every worker calls it at the same point, between two steps.
        """
        self._catch_up()
        own: dict[str, Any] = {"random": randomness.capture(self.device)}
        own["losses"] = self._losses.state()
        if self._loader is not None:
            own["balance"] = self._loader.coordinator.own_state()
        return {
            "schema": STATE_SCHEMA,
            "size": self.size,
            "seed": self.settings.seed,
            "model": self._model.module.state_dict() if self._model is not None else None,
            "layout": list(self._model.gradient_order) if self._model is not None else [],
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else None,
            "loader": self._loader.state_dict() if self._loader is not None else None,
            "own": self.comm.gather_text(json.dumps(own), SAVING),
            "rates": self._rates.state(),
            "sync": self._rounds.state() if self._rounds is not None else None,
            "replicas": self._replicas(),
        }

    def _replicas(self) -> list[Any]:
        """What differs between workers in local training: everybody's on worker 0, one's own elsewhere."""
        if self._rounds is None:
            return []
        mine = checkpoint.to_bytes(self._rounds.own_state())
        everybody = self.comm.collect(mine)
        return everybody or [mine if rank == self.rank else None for rank in range(self.size)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Call it after `wrap` and `loader`, on every worker.

        Raises:
            CheckpointError: it is of a newer schema, another seed, or lacks what this run has.
        """
        if state["schema"] != STATE_SCHEMA:
            raise CheckpointError(
                f"the state has schema {state['schema']}, this paceline reads {STATE_SCHEMA}: use the paceline that wrote it, or "
                f"take the weights alone from its 'model'"
            )
        if state["seed"] != self.settings.seed:
            raise CheckpointError(
                f"a run resumes with its own seed: the checkpoint has seed={state['seed']}, this run seed="
                f"{self.settings.seed}"
            )
        for name, mine in (("model", self._model), ("optimizer", self._optimizer), ("loader", self._loader)):
            if (state[name] is None) != (mine is None):
                here = "has none" if mine is None else "has one"
                raise CheckpointError(f"checkpoint and run must both have a {name} or neither: this run {here}")
        same_size = state["size"] == self.size
        own = json.loads(state["own"][self.rank]) if same_size else None
        if self._loader is not None:
            self._loader.load_state_dict(state["loader"], own["balance"] if own else None)
        if self._model is not None:
            self._model.module.load_state_dict(state["model"])
            if same_size:
                self._model.lay_out(state["layout"])
        self._rates.load(state["rates"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        if self._rounds is not None and state.get("sync") is not None:
            mine = state["replicas"][self.rank] if same_size else None
            note = self._rounds.load(state["sync"], checkpoint.from_bytes(mine) if mine is not None else None)
            if note:
                self._log.write("note", text=note)
        elif self._model is not None and (state.get("sync") or {}).get("anchor") is not None:
            flat = Flat(self._model.module)
            flat.write(state["sync"]["anchor"], 0, flat.length + flat.tail)
            self._log.write(
                "note", text="saved by replicas that differ: this run goes on from what they agreed on last"
            )
        if own is not None:
            self._losses.load(own.get("losses", []))
            randomness.restore(own["random"], self.device)
        else:
            torch.manual_seed(self.settings.seed * 1_000_003 + self.rank)

    def save(self, path: str | os.PathLike[str], **extra: Any) -> None:
        """Write a checkpoint atomically. Collective: every worker calls it between the same two steps.

        Args:
            path: the file; worker 0 writes it.
            extra: more to save, by name: objects with `state_dict()` (a scheduler, a GradScaler), or plain values.

        Raises:
            CheckpointError: on every worker, if it could not be written, or a parameter is not finite.
        """
        problem = ""
        state = self.state_dict()
        if self._rounds is not None and self._rounds.local:
            problem = "" if self._rounds.finite() else "what replicas agreed on last holds NaN or infinity"
        elif self._model is not None:
            bad = [name for name, p in self._model.module.named_parameters() if not bool(torch.isfinite(p).all())]
            if bad:
                problem = f"parameter {bad[0]!r} holds NaN or infinity; the checkpoint on disk is kept as it was"
        problems = [text for text in self.comm.gather_text(problem, SAVING) if text]
        if self.is_main and not problems:
            state["extra"] = {
                name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in extra.items()
            }
            try:
                checkpoint.write(Path(path), state)
            except CheckpointError as error:
                problem = str(error)
        problems = problems or [text for text in self.comm.gather_text(problem, SAVING) if text]
        if problems:
            raise CheckpointError(f"not saved: {problems[0]}")
        self._log.write("state", action="saved", path=str(path), step=self._loader.step if self._loader else 0, note="")

    def load(self, path: str | os.PathLike[str], **extra: Any) -> dict[str, Any]:
        """Go on from a checkpoint. Collective; the file must be readable by every worker.

        Args:
            path: the file.
            extra: objects with `load_state_dict()`, by the names they were saved under.

        Returns:
            Everything that was saved as `extra`.

        Raises:
            CheckpointError: on every worker, naming the first one that could not use the file.
        """
        problem, state = "", {}
        try:
            state = checkpoint.read(Path(path))
        except CheckpointError as error:
            problem = str(error)
        for rank, text in enumerate(self.comm.gather_text(problem, "loading, which every worker must take part in")):
            if text:
                raise CheckpointError(f"worker {rank}: {text}")
        found: dict[str, Any] = state["extra"]
        missing = sorted(set(extra) - set(found))
        if missing:
            raise CheckpointError(
                f"{path} has no {missing[0]!r}; it was saved with: {', '.join(sorted(found)) or 'nothing more'}"
            )
        self.load_state_dict(state)
        for name, value in extra.items():
            value.load_state_dict(found[name])
        self._log.write(
            "state", action="loaded", path=str(path), step=self._loader.step if self._loader else 0, note=""
        )
        return found

    def _watch_exit(self) -> None:
        """See how the program ends, so that leaving is clean and an out-of-memory error says what to do."""
        self._previous_hook = sys.excepthook

        def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._failed = True
            if is_out_of_memory(error):
                explain(error, self.comm.rank, self._total)
            self._previous_hook(kind, error, trace)

        sys.excepthook = on_error
        atexit.register(self.close)

    def close(self) -> None:
        """Leave the world. Called at exit; calling it earlier is harmless."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        sys.excepthook = self._previous_hook
        for hook in self._hooks:
            hook.remove()
        self._log.write(
            "end", step=self._loader.step if self._loader else 0, ok=not self._failed, dropped=self._log.dropped
        )
        self._log.close()
        if self._rounds is not None:
            self._rounds.close(graceful=not self._failed)
        self._model = self._runner = self._rounds = None
        self.comm.close(graceful=not self._failed)

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._failed = self._failed or error is not None
        self.close()


def _versions() -> dict[str, str]:
    return {
        "paceline": version("paceline"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
