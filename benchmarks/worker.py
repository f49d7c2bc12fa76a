"""One of the processes of an interleaved run; started by `benchmarks.interleave`.

python -m benchmarks.worker OUT_DIR CASE_JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.contenders import make
from paceline.lab.clusterfile import load
from paceline.lab.paced import Pacer
from paceline.process import die_with_launcher


def main() -> None:
    """Alternate blocks of steps of all contenders; write this rank's times."""
    out, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    die_with_launcher()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    cluster = load(case["cluster"])
    total = case["batch_size"]
    by_hand, _ = cluster.optimum(total)
    pacers = {
        name: Pacer(cluster, rank, out / f"pace-{number}-{rank}.jsonl")
        for number, name in enumerate(case["contenders"])
    }
    contenders = {name: make(name, pacers[name], total, case["repeat"], by_hand) for name in case["contenders"]}
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}  # per step: seconds, whether a block began
    splits: dict[str, list[list[int]]] = {name: [] for name in contenders}
    names = list(contenders)
    for block in range(case["blocks"]):
        for name in names[block % len(names) :] + names[: block % len(names)]:
            dist.barrier()
            for number in range(case["block_steps"]):
                begun = time.perf_counter()
                contenders[name].step()
                times[name].append([time.perf_counter() - begun, float(number == 0)])
                splits[name].append(list(contenders[name].split))
    (out / f"rank-{rank}.json").write_text(json.dumps({"times": times, "splits": splits}))
    dist.barrier()
    for contender in contenders.values():
        if hasattr(contender, "pace"):
            contender.pace.close()
    contenders.clear()
    dist.destroy_process_group()


main()
