"""What the lab starts in place of a script: sets the pace for this worker, then runs the script as it is.

python -m paceline.lab.worker LAB_DIR train.py [arguments]
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Pace this process as the worker of its rank, then run the script."""
    lab_dir, script, *arguments = sys.argv[1:]
    from paceline.comm.launch import die_with_launcher
    from paceline.lab.cluster import Cluster
    from paceline.lab.paced import Pacer

    die_with_launcher()
    cluster = Cluster.from_plain(json.loads((Path(lab_dir) / "cluster.json").read_text()))
    rank = int(os.environ["RANK"])
    Pacer(cluster, rank, Path(lab_dir) / f"worker-{rank:04d}.jsonl").install()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
