"""torchft 0.2: its `Manager`, `ProcessGroupGloo`, `DistributedDataParallel` and `Optimizer`; equal shares.

Every worker is a replica group of one, and worker 0 hosts the lighthouse. The quorum is the whole cluster; a step that is not
committed ends the run, because nothing fails in a benchmark. Its DistributedDataParallel is a subclass of torch's. With
`task.options["diloco"]` its `DiLoCo` makes an outer step every so many steps instead; torch's own DistributedDataParallel in a
world of one then stands around the model, so that the cluster is emulated as for everybody else.
"""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from paceline.bench.task import Task, as_it_is

_TIMEOUT = timedelta(minutes=5)


def train(task: Task) -> None:
    """Train until the task is over."""
    os.environ.setdefault("RUST_LOG", "warn")  # read when imported; else it logs some ten lines a step and worker
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    every = task.options.get("diloco", 0)
    task.apart = every > 0

    # Gradients do not pass through this group: it hands out an address, and is where everybody waits at the end.
    dist.init_process_group("gloo")
    host = os.environ["MASTER_ADDR"]
    own = _address_towards(host)
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=task.size) if task.rank == 0 else None
    port = [lighthouse.address().rpartition(":")[2] if lighthouse else None]
    dist.broadcast_object_list(port)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=_TIMEOUT)
    plain = task.model()
    inner = task.optimizer(plain.parameters())

    def load_state_dict(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=group,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=task.size,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{host}:{port[0]}",
        replica_id=f"worker_{task.rank}",
        hostname=own,
        init_sync=False,  # the task makes the same weights everywhere
        max_retries=0,
        use_async_quorum=every == 0,
    )
    if every:
        alone = [dist.new_group([rank]) for rank in range(task.size)][task.rank]
        model: Any = torch.nn.parallel.DistributedDataParallel(plain, process_group=alone)
        optimizer: Any = inner
        outer = torch.optim.SGD(plain.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        rounds: Any = DiLoCo(manager, [plain], inner, outer, sync_every=every)
    else:
        model, optimizer = DistributedDataParallel(manager, plain), Optimizer(manager, inner)
        rounds = nullcontext()
    sampler = DistributedSampler(
        task.train, task.rank, task.size, group_rank=0, num_replicas=1, shuffle=True, seed=task.seed, drop_last=True
    )
    loader = DataLoader(task.train, task.batch_size // task.size, sampler=sampler, drop_last=True, collate_fn=as_it_is)
    over, epoch = False, 0
    with rounds:
        while not over:
            sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                task.loss(model, batch).backward()
                optimizer.step()
                over = task.stepped(plain)
                if over:
                    break
            epoch += 1
    dist.barrier()  # the lighthouse goes last
    manager.shutdown()
    del model
    group.shutdown()
    dist.barrier()
    if lighthouse:
        lighthouse.shutdown()
    dist.destroy_process_group()


def _address_towards(host: str) -> str:
    """This machine's address as others see it; its hostname need not resolve there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # picks a route; sends nothing
        return str(probe.getsockname()[0])
