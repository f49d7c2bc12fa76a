"""What a process owes to the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
