"""A process that keeps a core busy beside a worker: `python -m paceline.lab.hog WORKER`."""

from __future__ import annotations

import sys

from paceline.lab.cgroup import join
from paceline.process import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()
    join(int(sys.argv[1]))
    while True:
        pass
