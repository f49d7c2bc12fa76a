"""What a process owes to the one that started it, and to those it has started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

LAUNCHER = "PACELINE_LAUNCHER"
NODE = "PACELINE_NODE"  # the name of this worker's node, where the host's name does not tell


def die_with_launcher() -> None:
    """If `paceline` started this process, let the kernel end it should the launcher die; Linux only."""
    launcher = os.environ.get(LAUNCHER)
    if launcher and sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() == 1 and int(launcher) != 1:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)


def children() -> set[int]:
    """The processes this one has started and that have not been waited for; Linux only, none elsewhere."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
        if parent == os.getpid():
            found.add(int(place.name))
    return found


def end(pids: set[int], patience_s: float = 5.0) -> None:
    """End children: they are asked to, and killed where that does not help."""
    waiting, deadline = set(pids), time.monotonic() + patience_s
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in waiting:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while waiting and time.monotonic() < deadline:
            waiting -= {pid for pid in waiting if _gone(pid)}
            time.sleep(0.02)
        deadline = time.monotonic() + patience_s  # even a killed one may hang in a device; nobody waits for it for ever


def _gone(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # somebody else has waited for it
        return True
