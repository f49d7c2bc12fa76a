"""A run over several emulated machines: one launcher per node, each in the node's network namespace.

`python -m paceline.lab.nodes JOB_JSON` is such a launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.comm.launch import Job, Screen, launch
from paceline.errors import LaunchError, Stopped
from paceline.lab.cluster import Cluster
from paceline.lab.netns import Network
from paceline.process import LAUNCHER, die_with_launcher

PORT = 29500  # a namespace is new: nobody else has it
PATIENCE_S = 40.0


def launch_nodes(
    cluster: Cluster,
    network: Network,
    command: list[str],
    log_dir: Path,
    env: Mapping[str, str],
    python: str,
    screen: Screen,
) -> None:
    """Run a command on all workers of all nodes, to its end.

    Raises:
        LaunchError: a worker failed.
        Stopped: the user interrupted; the workers are gone.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **env, "GLOO_SOCKET_IFNAME": "eth0", LAUNCHER: str(os.getpid())}
    started: list[subprocess.Popen[bytes]] = []
    errors = [log_dir / f"{node.name}.err" for node in cluster.nodes]
    reader: threading.Thread | None = None
    try:
        for number, node in enumerate(cluster.nodes):
            job = {
                "command": command,
                "nproc": node.num_workers,
                "log_dir": str(log_dir / node.name),
                "python": python,
                "nnodes": len(cluster.nodes),
                "rendezvous": {"node_rank": number, "master_addr": network.address(0), "master_port": PORT},
            }
            with errors[number].open("wb") as error:
                process = subprocess.Popen(
                    [*network.prefix(number), sys.executable, "-m", "paceline.lab.nodes", json.dumps(job)],
                    env=environment,
                    stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                    stderr=error,
                    start_new_session=True,  # an interrupt reaches us alone, and we pass it on
                )
            started.append(process)
        reader = threading.Thread(target=_copy, args=(started[0], screen), daemon=True)
        reader.start()
        while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
            screen.tick()
            time.sleep(0.1)
        _raise_first(cluster, started, errors)
    except KeyboardInterrupt:
        raise Stopped from None
    finally:
        _end(started)
        if reader is not None:
            reader.join(timeout=5)
            stream = started[0].stdout
            if stream is not None:
                stream.close()


def _copy(process: subprocess.Popen[bytes], screen: Screen) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        screen.out(line.decode(errors="replace"))


def _raise_first(cluster: Cluster, started: list[subprocess.Popen[bytes]], errors: list[Path]) -> None:
    failed = [number for number, process in enumerate(started) if process.poll()]
    if not failed:
        return
    deadline = time.monotonic() + 3  # the cause may be another node's; let it say so
    while time.monotonic() < deadline and len(failed) < len(started):
        time.sleep(0.1)
        failed = [number for number, process in enumerate(started) if process.poll()]
    texts = {number: errors[number].read_text(errors="replace").strip() for number in failed}
    blaming = ("PeerLost", "PeerTimeout", "Connection reset", "Connection closed by peer")
    causes = [number for number in failed if not any(word in texts[number] for word in blaming)]
    first = (causes or failed)[0]
    raise LaunchError(f"on node {cluster.nodes[first].name}:\n{texts[first]}", abs(started[first].returncode or 1))


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    for process in started:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # its workers die with it
            process.wait()


def main() -> None:
    """Launch the workers of one node."""
    die_with_launcher()
    given: dict[str, Any] = json.loads(sys.argv[1])
    try:
        launch(Job(**{**given, "log_dir": Path(given["log_dir"])}), Screen())
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
