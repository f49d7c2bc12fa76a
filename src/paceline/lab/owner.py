"""Names that say which process owns a thing of the kernel's, so that what a dead launcher left can be found.

A process id alone is used again after a while; with the moment the process started it is unique until a reboot.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"paceline-(\d+)-(\d+)(?:-.*)?")


def tag() -> str:
    """What the names of everything this process makes begin with: `paceline-<pid>-<start>`."""
    pid = os.getpid()
    return f"paceline-{pid}-{_start(pid)}"


def alive(pid: int, start: int) -> bool:
    """Whether the process that began at `start` (clock ticks since boot) under this id still runs."""
    return _start(pid) == start


def owner_alive(name: str) -> bool | None:
    """Whether the process that a name stands for still runs; None if the name is not one of ours.

    >>> owner_alive(tag() + "-hub"), owner_alive("paceline-1-1"), owner_alive("docker0")
    (True, False, None)
    """
    found = _NAME.fullmatch(name)
    return alive(int(found[1]), int(found[2])) if found else None


def _start(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the command's name, before it, may hold anything
    return None if state in "ZX" else int(fields[18])
