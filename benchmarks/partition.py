"""Time, memory and quality of partitions, each in a process of its own on one thread: python -m benchmarks.partition METHOD SAMPLES."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

SPEEDS = [1, 2, 3, 4, 5, 6]
MANY = list(range(1, 17))
CASES = [
    ("random", 10_000, SPEEDS),
    ("stratified", 10_000, SPEEDS),
    ("kmeans+stratify", 10_000, SPEEDS),
    ("rcd", 10_000, SPEEDS),
    ("rcd-cut", 10_000, SPEEDS),
    ("exact", 10_000, SPEEDS),
    ("balanced", 10_000, SPEEDS),
    ("random", 60_000, SPEEDS),
    ("kmeans+stratify", 60_000, SPEEDS),
    ("rcd-cut", 60_000, SPEEDS),
    ("exact", 60_000, SPEEDS),
    ("balanced", 60_000, SPEEDS),
    ("balanced", 250_000, MANY),
    ("balanced", 1_000_000, MANY),
]


def measure(method: str, count: int, speeds: list[float]) -> dict[str, float]:
    """One partition of blobs: four clusters in each of ten classes, 64 columns."""
    import numpy as np

    from paceline.policies.partition.metrics import mmd_ratio
    from paceline.policies.partition.spread import standardised
    from paceline.shards import partition

    random = np.random.default_rng(0)
    labels = random.integers(0, 10, count)
    centres = random.standard_normal((10, 4, 64)).astype(np.float32)
    features = centres[labels, random.integers(0, 4, count)] + random.standard_normal((count, 64), dtype=np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    if method == "kmeans+stratify":  # what scikit-learn offers: clusters within classes, then random within clusters
        from sklearn.cluster import MiniBatchKMeans

        groups = np.empty(count, np.int64)
        for number in range(10):
            members = np.flatnonzero(labels == number)
            found = MiniBatchKMeans(16, n_init=1, random_state=0).fit_predict(features[members])
            groups[members] = 16 * number + found
        made = partition(features, groups, speeds=speeds, method="stratified")
        took = time.perf_counter() - begun
        ratio = mmd_ratio(standardised(features), labels, made.parts, len(speeds), 0)
    else:
        made = partition(features, labels, speeds=speeds, method=method)
        took = time.perf_counter() - begun
        ratio = made.metrics["mmd_ratio"]
    found = {"seconds": took, "mmd_ratio": ratio, "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if method == "balanced" and count == 60_000:
        plan, moves = made.rebalance([2, 2, 3, 4, 5, 5])
        found |= {"moved": len(moves) / count, "fewest": moves.fewest / count, "after": plan.metrics["mmd_ratio"]}
    return {**found, "data_gib": before / 2**20}


def partitioning() -> list[str]:
    """The table."""
    lines = [
        "### Partitions of blobs (64 columns, ten classes), one core, quality included in the time",
        "",
        "| method | samples | parts | seconds | µs a sample | MMD over random's | peak memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    notes = []
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    for method, count, speeds in CASES:
        command = [sys.executable, "-m", "benchmarks.partition", method, str(count), json.dumps(speeds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **threads})
        found = json.loads(done.stdout.splitlines()[-1])
        lines.append(
            f"| {method} | {count} | {len(speeds)} | {found['seconds']:.2f} | {found['seconds'] / count * 1e6:.1f} | "
            f"{found['mmd_ratio']:.3f} | {found['gib']:.2f} |"
        )
        if "moved" in found:
            notes = [
                "",
                f"Speeds 1..6 to 2,2,3,4,5,5: {found['moved']:.1%} of the samples move, {found['fewest']:.1%} is the least possible; MMD "
                f"after it {found['after']:.3f} of random's.",
            ]
    return lines + notes


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
