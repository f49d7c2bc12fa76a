"""Processes that are started are ended, and nobody else."""

from __future__ import annotations

import subprocess
import sys

from paceline.process import children, end

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def test_what_was_started_is_ended_and_nobody_else():
    with subprocess.Popen(["sleep", "600"]) as other:
        others = children()
        with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as deaf:
            with subprocess.Popen(["sleep", "600"]) as mild, subprocess.Popen(["true"]) as gone:
                gone.wait()
                assert deaf.stdout is not None
                deaf.stdout.readline()  # it hears nothing from now on
                assert children() - others == {deaf.pid, mild.pid}
                end({deaf.pid, mild.pid, gone.pid}, patience_s=0.5)
                assert children() == others
        assert other.poll() is None
        other.kill()
