"""Real gloo ranks for tests: `forkserver` with torch preloaded, a store in this process, no fixed ports."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo is what the first optimizer imports: a second of work in every rank otherwise.
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "paceline.runtime.pace", "torch.nn.parallel"]
)


@dataclass
class Outcome:
    """How one rank ended."""

    value: Any = None
    error: str = ""
    kind: str = ""
    exit_code: int | None = None


def _child(pipe, rank, size, port, env, timeout_s, fn, args):
    import torch

    faulthandler.dump_traceback_later(0.8 * timeout_s)  # shows where a rank hangs

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        **env,
    )
    torch.set_num_threads(1)
    code = 0
    try:
        outcome = Outcome(value=fn(*args))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        outcome = Outcome(error="".join(traceback.format_exception(error)), kind=type(error).__name__)
        code = 1
    pipe.send_bytes(pickle.dumps(outcome))  # by value: torch's own pickling would share memory
    atexit._run_exitfuncs()  # multiprocessing skips them
    sys.exit(code)


def outcomes(size: int, fn: Any, *args: Any, timeout_s: float = 60, env: dict[str, str] | None = None) -> list[Outcome]:
    """Run `fn(*args)` on `size` ranks; how each ended. A rank that does not end in time is killed and says so."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    children, pipes = [], []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(
            target=_child, args=(theirs, rank, size, store.port, env or {}, timeout_s, fn, args), daemon=False
        )
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(ours)
    results = [Outcome(kind="Killed", error=f"rank {rank} died without a word") for rank in range(size)]
    deadline = time.monotonic() + timeout_s
    pending = dict(enumerate(pipes))
    while pending and time.monotonic() < deadline:
        for pipe in wait(list(pending.values()), timeout=0.5):
            rank = pipes.index(pipe)
            del pending[rank]
            try:
                results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                pass
    for rank, child in enumerate(children):
        child.join(max(1.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
            results[rank] = Outcome(kind="Hang", error=f"rank {rank} did not end within {timeout_s} s")
        results[rank].exit_code = child.exitcode
    return results


def run(size: int, fn: Any, *args: Any, timeout_s: float = 60, env: dict[str, str] | None = None) -> list[Any]:
    """Run `fn(*args)` on `size` ranks and return what each returned; any error or abort fails the test."""
    results = outcomes(size, fn, *args, timeout_s=timeout_s, env=env)
    for rank, result in enumerate(results):
        assert not result.kind, f"rank {rank}: {result.error}"
        assert result.exit_code == 0, f"rank {rank} ended with exit code {result.exit_code}"
    return [result.value for result in results]
