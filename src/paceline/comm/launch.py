"""Starting the workers of a run on this machine, on top of torchrun's own launcher.

What torchrun leaves to the user is done here: every worker writes to a log file of its own, only the first local worker's output
reaches the screen, and when something fails the first failing worker's traceback is the last thing on it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, LaunchError, Stopped
from paceline.process import children, end

TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")


@dataclass(frozen=True)
class Job:
    """What to start.

    Args:
        command: what each worker runs, after the Python interpreter.
        nproc: workers on this machine.
        log_dir: folder for their output.
        env: environment to add.
        python: the interpreter.
        nnodes: machines in the run.
        rendezvous: torchrun's settings for several machines: node_rank, master_addr, master_port, rdzv_backend,
            rdzv_endpoint, rdzv_id.
    """

    command: list[str]
    nproc: int
    log_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    nnodes: int = 1
    rendezvous: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ConfigError(f"nproc must be at least 1, got {self.nproc}")
        if self.nnodes < 1:
            raise ConfigError(f"nnodes must be at least 1, got {self.nnodes}")


class Screen:
    """Where a job's output goes; the command line has one that draws a progress line."""

    def out(self, text: str) -> None:
        """A piece of the first worker's standard output."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def err(self, text: str) -> None:
        """A piece of the first worker's standard error."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def tick(self) -> None:
        """Called a few times a second."""


class Silent(Screen):
    """Output stays in the logs."""

    def out(self, text: str) -> None:
        """Nothing."""

    def err(self, text: str) -> None:
        """Nothing."""


def launch(job: Job, screen: Screen) -> None:
    """Run the job to its end.

    Raises:
        LaunchError: a worker failed; carries its exit code, its traceback is in the message.
        Stopped: the user interrupted; the workers are gone.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = {"OMP_NUM_THREADS": "1"} if job.nproc > 1 else {}  # as torchrun does
    environment = {**threads, "PYTHONUNBUFFERED": "1", **os.environ, **job.env}
    environment["PACELINE_LAUNCHER"] = str(os.getpid())
    before = dict(os.environ)
    os.environ.update(environment)
    logs = job.log_dir / f"{socket.gethostname()}-{os.getpid()}"  # machines may share the folder
    tail = Tail(logs, screen)
    others = children()
    try:
        config = _config(job, logs)
        tail.start()
        elastic_launch(config, job.python)("-u", *job.command)
    except ChildFailedError as error:
        tail.stop()
        raise _failed(logs, error) from None
    except (SignalException, KeyboardInterrupt) as error:
        end(children() - others)  # torchrun forgets workers when it is interrupted while it starts them
        code = getattr(error, "sigval", signal.SIGINT)
        if code in (signal.SIGINT, 2):
            raise Stopped from None
        raise LaunchError(f"stopped by signal {int(code)}", 128 + int(code)) from None
    finally:
        tail.stop()
        os.environ.clear()
        os.environ.update(before)


def _config(job: Job, log_dir: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    logs = DefaultLogsSpecs(log_dir=str(log_dir), redirects=Std.ALL, tee=Std.NONE)
    common = {"nproc_per_node": job.nproc, "max_restarts": 0, "monitor_interval": 0.1, "logs_specs": logs}
    given = {name: value for name, value in job.rendezvous.items() if value is not None}
    if job.nnodes == 1 and not given:
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            run_id=uuid.uuid4().hex[:8],
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            **common,
        )
    backend = given.get("rdzv_backend", "static")
    endpoint = given.get("rdzv_endpoint", "")
    configs: dict[str, Any] = {}
    if backend == "static":
        if "node_rank" not in given and job.nnodes > 1:
            raise ConfigError(f"with {job.nnodes} machines each needs its own --node-rank (0 to {job.nnodes - 1})")
        configs = {"rank": given.get("node_rank", 0), "timeout": 900}
        endpoint = endpoint or f"{given.get('master_addr', '127.0.0.1')}:{given.get('master_port', 29500)}"
    elif not endpoint:
        raise ConfigError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT")
    return LaunchConfig(
        min_nodes=job.nnodes,
        max_nodes=job.nnodes,
        run_id=given.get("rdzv_id", "paceline"),
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=configs,
        **common,
    )


def _failed(log_dir: Path, error: Any) -> LaunchError:
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    log = log_file(log_dir, failure.local_rank, "stderr")
    shown = last_error(log.read_text(errors="replace") if log else "")
    how = (
        f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"failed with exit code {failure.exitcode}"
    )
    where = f"\nIts whole output: {log.parent}" if log else ""
    return LaunchError(f"{shown.rstrip()}\n\nworker {rank} {how}.{where}", code)


def last_error(text: str) -> str:
    """The last traceback in a log, with the ones it was caused by; or the last lines, if there is none.

    >>> print(last_error("noise\\n[rank1]: Traceback (most recent call last):\\n[rank1]: ValueError: no"))
    Traceback (most recent call last):
    ValueError: no
    """
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.strip() == TRACEBACK]
    if not starts:
        return "\n".join(lines[-10:])
    begin = starts.pop()
    while starts and any(line.startswith(CHAINED) for line in lines[max(0, begin - 3) : begin]):
        begin = starts.pop()
    return "\n".join(lines[begin:])


def log_file(log_dir: Path, local_rank: int, stream: str) -> Path | None:
    """The log of a local worker, once it exists."""
    return next(log_dir.glob(f"*/attempt_*/{local_rank}/{stream}.log"), None)


class Tail:
    """Copies the first local worker's output to the screen as it grows.

    From a traceback on, its standard error is held back: it may only echo another worker's failure.
    """

    def __init__(self, log_dir: Path, screen: Screen) -> None:
        self._log_dir, self._screen = log_dir, screen
        self._read: dict[str, int] = {"stdout": 0, "stderr": 0}
        self._held = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-tail", daemon=True)

    def start(self) -> None:
        """Begin copying."""
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left, and end."""
        if not self._stop.is_set():
            self._stop.set()
            if self._thread.is_alive():
                self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._copy()
            self._screen.tick()
            time.sleep(0.1)
        self._copy()

    def _copy(self) -> None:
        for stream in self._read:
            path = log_file(self._log_dir, 0, stream)
            if path is None:
                continue
            with path.open("rb") as file:
                file.seek(self._read[stream])
                data = file.read()
            if not self._stop.is_set() and not data.endswith(b"\n"):
                data = data[: data.rfind(b"\n") + 1]
            self._read[stream] += len(data)
            text = data.decode(errors="replace")
            if stream == "stdout" and text:
                self._screen.out(text)
            elif text and not self._held:
                found = re.search(rf"^(\[rank\d+\]: )?{re.escape(TRACEBACK)}", text, re.MULTILINE)
                self._held = found is not None
                shown = text[: found.start()] if found else text
                if shown.strip():
                    self._screen.err(shown)
