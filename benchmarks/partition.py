"""Time, memory and quality of partitions, each in a process of its own on one thread: python -m benchmarks.partition METHOD DATA SAMPLES SPEEDS."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPEEDS = [1, 2, 3, 4, 5, 6]
MANY = list(range(1, 17))
CASES = [
    ("random", "embeddings", 10_000, SPEEDS),
    ("stratified", "embeddings", 10_000, SPEEDS),
    ("kmeans+stratify", "embeddings", 10_000, SPEEDS),
    ("apricot", "embeddings", 10_000, SPEEDS),
    ("rcd", "embeddings", 10_000, SPEEDS),
    ("rcd-cut", "embeddings", 10_000, SPEEDS),
    ("exact", "embeddings", 10_000, SPEEDS),
    ("balanced", "embeddings", 10_000, SPEEDS),
    ("random", "embeddings", 60_000, SPEEDS),
    ("kmeans+stratify", "embeddings", 60_000, SPEEDS),
    ("rcd-cut", "embeddings", 60_000, SPEEDS),
    ("exact", "embeddings", 60_000, SPEEDS),
    ("balanced", "embeddings", 60_000, SPEEDS),
    ("exact", "blobs", 60_000, SPEEDS),
    ("balanced", "blobs", 60_000, SPEEDS),
    ("random", "embeddings", 1_000_000, MANY),
    ("kmeans+stratify", "embeddings", 1_000_000, MANY),
    ("balanced", "embeddings", 250_000, MANY),
    ("balanced", "embeddings", 1_000_000, MANY),
]
_APRICOT = """
import sys, time
import numpy as np
from apricot import FacilityLocationSelection
data = np.load(sys.argv[1])
quota, alike, left = data["quota"], data["alike"], np.arange(len(data["alike"]))
parts = np.full(len(left), int(np.argmax(quota)))
begun = time.perf_counter()
for part in np.argsort(quota)[:-1]:
    chosen = FacilityLocationSelection(int(quota[part]), metric="precomputed", optimizer="lazy").fit(alike[np.ix_(left, left)])
    parts[left[chosen.ranking]] = part
    left = np.delete(left, chosen.ranking)
np.savez(sys.argv[2], parts=parts, took=time.perf_counter() - begun)
"""


def samples(kind: str, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """64 columns, ten classes of four clusters each.

    `blobs` have a variance of 1 in every direction within a cluster, so there is nothing to be alike in but 64 equal directions and their
    products: the hardest case. In `embeddings` the variance of the k-th direction falls as 1/k, as in what networks make of their inputs.
    """
    import numpy as np

    random = np.random.default_rng(0)
    labels = random.integers(0, 10, count)
    scale = (np.arange(1, 65) ** -0.5 if kind == "embeddings" else np.ones(64)).astype(np.float32)
    turned = np.linalg.qr(random.standard_normal((64, 64)))[0].astype(np.float32)
    centres = random.standard_normal((10, 4, 64)).astype(np.float32)
    inner = centres[labels, random.integers(0, 4, count)] + random.standard_normal((count, 64), dtype=np.float32)
    return (inner * scale) @ turned, labels


def measure(method: str, kind: str, count: int, speeds: list[float]) -> dict[str, float]:
    """One partition."""

    from paceline.policies.partition.metrics import mmd_ratio
    from paceline.policies.partition.spread import standardised
    from paceline.shards import partition

    features, labels = samples(kind, count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    if method in ("kmeans+stratify", "apricot"):
        chosen = _clusters(features, labels, speeds) if method == "kmeans+stratify" else None
        took = time.perf_counter() - begun
        if chosen is None:
            chosen, took = _apricot(features, labels, speeds)
        ratio = mmd_ratio(standardised(features), labels, chosen, len(speeds), 0)
    else:
        made = partition(features, labels, speeds=speeds, method=method)
        took = time.perf_counter() - begun
        ratio = made.metrics["mmd_ratio"]
    found = {"seconds": took, "mmd_ratio": ratio, "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if method == "balanced" and kind == "embeddings" and count == 60_000:
        plan, moves = made.rebalance([2, 2, 3, 4, 5, 5])
        found |= {"moved": len(moves) / count, "fewest": moves.fewest / count, "after": plan.metrics["mmd_ratio"]}
    return {**found, "data_gib": before / 2**20}


def _clusters(features: NDArray[np.float32], labels: NDArray[np.int64], speeds: list[float]) -> NDArray[np.int64]:
    """What scikit-learn offers: clusters within classes, then random within clusters."""
    import numpy as np
    from sklearn.cluster import MiniBatchKMeans

    from paceline.shards import partition

    groups = np.empty(len(labels), np.int64)
    for number in range(10):
        members = np.flatnonzero(labels == number)
        found = MiniBatchKMeans(16, n_init=1, random_state=0).fit_predict(features[members])
        groups[members] = 16 * number + found
    return partition(features, groups, speeds=speeds, method="stratified").parts


def _apricot(
    features: NDArray[np.float32], labels: NDArray[np.int64], speeds: list[float]
) -> tuple[NDArray[np.int64], float]:
    """What apricot-select offers: subsets by facility location, one part after the other; the seconds it took by itself."""
    import numpy as np

    from paceline.bench import peers
    from paceline.policies.partition.quotas import quotas, shares
    from paceline.policies.partition.spread import bandwidth, kernel, standardised

    peers.PEERS["apricot"] = ("apricot-select==0.6.1",)
    root = Path(os.environ.get("PACELINE_PEERS", Path.home() / ".cache" / "paceline" / "peers"))
    python = peers.environment("apricot", root)
    ready, out, took = standardised(features), np.empty(len(labels), np.int64), 0.0
    width = bandwidth(ready, np.random.default_rng(0))
    quota = quotas(np.bincount(labels).tolist(), shares(speeds))
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "given.npz", Path(folder) / "answer.npz"
        for number, row in enumerate(quota):
            members = np.flatnonzero(labels == number)
            np.savez(given, quota=row, alike=kernel(ready[members], ready[members], width).astype(np.float64))
            subprocess.run([python, "-c", _APRICOT, given, answer], check=True)
            found = np.load(answer)
            out[members] = found["parts"]
            took += float(found["took"])
    return out, took


def partitioning() -> list[str]:
    """The table."""
    lines = [
        "### Partitions (64 columns, ten classes), one core; for ours measuring the quality is included in the time",
        "",
        "| method | data | samples | parts | seconds | µs a sample | MMD over random's | peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    for method, kind, count, speeds in CASES:
        command = [sys.executable, "-m", "benchmarks.partition", method, kind, str(count), json.dumps(speeds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **threads})
        found = json.loads(done.stdout.splitlines()[-1])
        lines.append(
            f"| {method} | {kind} | {count} | {len(speeds)} | {found['seconds']:.2f} | {found['seconds'] / count * 1e6:.1f} | "
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
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))))
