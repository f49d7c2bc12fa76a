"""One run of one contender in a process of its own, so that it can be killed; and its tests.

`python -m paceline.bench.one SPEC_JSON PYTHON`, with the interpreter of its workers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.comm.launch import Silent
from paceline.errors import PacelineError
from paceline.lab.cluster import Cluster
from paceline.lab.start import Start, run_on
from paceline.process import die_with_launcher


def main() -> None:
    """Run it on its cluster."""
    die_with_launcher()
    path, python = Path(sys.argv[1]), sys.argv[2]
    spec = json.loads(path.read_text())
    settings = {"run_dir": str(path.parent), **({"max_local_batch": spec["caps"]} if any(spec["caps"]) else {})}
    env = {"PACELINE_CLI": json.dumps(settings)} if spec["module"] == "ours" else {}
    start = Start("-m paceline.bench.train", [str(path)], path.parent, env, python)
    try:
        run_on(Cluster.from_plain(spec["cluster"]), start, Silent())
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None
    if spec["test_every"] or spec["test_samples"]:
        import torch

        from paceline.bench.score import score
        from paceline.bench.workloads import workload

        score(path.parent, workload(spec["workload"]), torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
