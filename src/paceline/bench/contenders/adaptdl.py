"""AdaptDL 0.2: `AdaptiveDataParallel` and `AdaptiveDataLoader`, without a scheduler; equal shares.

With `task.options["most"]` it chooses the global batch by itself (`autoscale_batch_size`). Otherwise the batch stays as it is, so
that its learning-rate rule (AdaScale; for Adam its square root) has a factor of 1, but for the first step: until a first backward
has ended, the library takes the batch to be as many times larger as there are workers. The order of its sampler depends on the
epoch alone, not on the seed.

`AdaptiveDataParallel` is a subclass of torch's DistributedDataParallel.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import numpy as np
import torch.distributed as dist

from paceline.bench.task import Task, as_it_is


def train(task: Task) -> None:
    """Train until the task is over."""
    # When imported it makes SIGTERM and SIGINT wait for the next step, to checkpoint there; a worker must end when told to.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if not hasattr(np, "int"):  # it was written for NumPy 1, and asks for this alias when it chooses a batch
        setattr(np, "int", int)  # noqa: B010 (mypy knows no such name)
    import adaptdl.torch as adl

    for number, handler in handlers.items():
        signal.signal(number, handler)
    store, _, _ = next(dist.rendezvous("env://", task.rank, task.size))
    if task.rank == 0:
        store.set("adaptdl_port", str(_free_port()))
    os.environ.update(
        ADAPTDL_MASTER_ADDR=os.environ["MASTER_ADDR"],
        ADAPTDL_MASTER_PORT=store.get("adaptdl_port").decode(),  # its own server: MASTER_PORT is torch's store
        ADAPTDL_REPLICA_RANK=str(task.rank),
        ADAPTDL_NUM_REPLICAS=str(task.size),
    )
    # It lets worker 0 open a second store; with this set torch would wait for torchrun to do so.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    adl.init_process_group("gloo")
    plain = task.model()
    optimizer = task.optimizer(plain.parameters())
    model = adl.AdaptiveDataParallel(plain, optimizer)
    loader = adl.AdaptiveDataLoader(
        task.train, batch_size=task.batch_size, shuffle=True, drop_last=True, collate_fn=as_it_is
    )
    most = task.options.get("most")
    if most:
        loader.autoscale_batch_size(most, local_bsz_bounds=(4, most // task.size))
    over, samples = False, 0
    for _ in adl.remaining_epochs_until(sys.maxsize):
        for batch in loader:
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
            samples += loader.current_local_bsz * task.size
            over = task.stepped(plain, samples)
            if over:
                break
        if over:
            break
    dist.barrier()
    del model
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
