"""`make bench`: every figure the project promises, measured, with median and spread.

python -m benchmarks [--out FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.interleave import Case, changes, middle, run, settled
from benchmarks.partition import partitioning
from benchmarks.view import longest, viewing
from paceline.lab.clusterfile import load
from paceline.policies.balance import policy
from paceline.types import Limits, Observation

BATCH = 256


def unlike(folder: Path, blocks: int) -> list[str]:
    """Four workers 1:2:3:4 with a fixed cost: share of the optimum, after the plan has settled."""
    names = ("plain DDP", "hand-tuned DDP", "paceline affine", "paceline dbs")
    result = run(Case("unlike", "bench-unlike", names, BATCH, blocks, 10, 20), folder)
    split, best = load("bench-unlike").optimum(BATCH)
    lines = [
        f"### Four unlike workers (speeds 1:2:3:4), optimum {best * 1e3:.1f} ms at {list(split)}",
        "",
        "| contender | step, ms (median ± spread) | share of optimum | against hand-tuned |",
        "|---|---|---|---|",
    ]
    by_hand = middle(settled(result, "hand-tuned DDP"))[0]
    for name in names:
        median, spread = middle(settled(result, name))
        lines.append(
            f"| {name} | {median * 1e3:.1f} ± {spread * 1e3:.1f} | {best / median:.3f} | {median / by_hand - 1:+.1%} |"
        )
    at = changes(result, "paceline affine")
    lines += [
        "",
        f"`affine` changed its plan {len(at)} times, at steps {at}; final split {result['splits']['paceline affine'][-1]}.",
    ]
    (folder / "unlike.json").write_text(json.dumps(result))
    return lines


def slowed(folder: Path, blocks: int) -> list[str]:
    """A worker slowed threefold at step 40: ten steps later, share of the new optimum."""
    names = ("hand-tuned DDP", "paceline affine", "paceline dbs")
    result = run(Case("slowed", "bench-slowed", names, BATCH, blocks, 10, 50, repeat=4), folder)
    _, before = load("bench-slowed").optimum(BATCH, step=39)
    split, best = load("bench-slowed").optimum(BATCH, step=40)
    lines = [
        f"### The fastest worker slowed 3x at step 40, new optimum {best * 1e3:.1f} ms at {list(split)} (before: {before * 1e3:.1f} ms)",
        "",
        "| contender | steps 40-49, ms | steps 50-69, ms (median ± spread) | share of new optimum |",
        "|---|---|---|---|",
    ]
    for name in names:
        steps = result["steps"][name]
        median, spread = middle(steps[50:70])
        lines.append(
            f"| {name} | {statistics.median(steps[40:50]) * 1e3:.1f} | {median * 1e3:.1f} ± {spread * 1e3:.1f} | {best / median:.3f} |"
        )
    at = [step for step in changes(result, "paceline affine") if step >= 38]
    late = [step for step in changes(result, "paceline dbs") if step >= 38]
    lines += ["", f"`affine` changed its plan at steps {at}; `dbs`, once per epoch of 22 steps, at {late}."]
    (folder / "slowed.json").write_text(json.dumps(result))
    return lines


def equal(folder: Path, blocks: int) -> list[str]:
    """Four equal workers: what balancing costs."""
    names = ("plain DDP", "paceline affine")
    result = run(Case("equal", "bench-equal", names, BATCH, blocks, 10, 20), folder)
    plain, ours = (settled(result, name) for name in names)
    base = statistics.median(plain)
    median, spread = middle(ratios(ours, plain))
    lines = [
        f"### Four equal workers, optimum {load('bench-equal').optimum(BATCH)[1] * 1e3:.1f} ms",
        "",
        "| contender | step, ms (median ± spread) |",
        "|---|---|",
    ]
    for name, steps in zip(names, (plain, ours), strict=True):
        lines.append(f"| {name} | {middle(steps)[0] * 1e3:.2f} ± {middle(steps)[1] * 1e3:.2f} |")
    lines += [
        "",
        f"Ratio over neighbouring blocks: {median:.4f} ± {spread:.4f} (overall {statistics.median(ours) / base:.4f}).",
    ]
    lines += [f"Plan changes after warm-up: {len([s for s in changes(result, 'paceline affine') if s >= 20])}."]
    (folder / "equal.json").write_text(json.dumps(result))
    return lines


def ratios(ours: list[float], plain: list[float], size: int = 9) -> list[float]:
    """Blocks alternate: the ratio of neighbouring blocks is free of slow drifts of the machine."""
    return [
        statistics.median(ours[i : i + size]) / statistics.median(plain[i : i + size])
        for i in range(0, min(len(ours), len(plain)) - size + 1, size)
    ]


def measured(folder: Path, blocks: int) -> list[str]:
    """What it costs to measure gradients for batch policies."""
    names = ("paceline equal", "paceline equal, norms", "paceline equal, inner products")
    result = run(Case("measured", "bench-equal", names, BATCH, blocks, 10, 20), folder)
    plain = settled(result, names[0])
    lines = [
        "### Measuring gradients, four equal workers",
        "",
        "| contender | step, ms | against none |",
        "|---|---|---|",
    ]
    for name in names:
        steps = settled(result, name)
        median, spread = middle(ratios(steps, plain))
        lines.append(f"| {name} | {middle(steps)[0] * 1e3:.2f} | {median:.4f} ± {spread:.4f} |")
    (folder / "measured.json").write_text(json.dumps(result))
    return lines


def planning(folder: Path, repeats: int) -> list[str]:
    """Cost of one decision of `affine`, fit included, by number of workers."""
    lines = [
        "### Cost of a plan (`affine`, fit included)",
        "",
        "| workers | ms a plan (median ± spread) | µs a worker |",
        "|---|---|---|",
    ]
    generator = random.Random(1)
    for count in (10, 100, 1000, 4000):
        fixed = [generator.uniform(0, 0.05) for _ in range(count)]
        slope = [generator.uniform(0.5, 5) / 1e3 for _ in range(count)]
        chosen, limits = policy("affine"), Limits.of(count)
        state, taken = chosen.init(count), []
        split = chosen.split(64 * count, limits, state)
        for step in range(repeats):
            times = tuple((c + a * b) * generator.gauss(1, 0.02) for c, a, b in zip(fixed, slope, split, strict=True))
            samples = tuple(map(float, split))
            seen = Observation(step, 0, False, 64 * count, limits, samples, times, (0.0,) * count, times, times)
            begun = time.perf_counter()
            decision, state = chosen.update(seen, state)
            taken.append(time.perf_counter() - begun)
            split = decision.split
        median, spread = middle(taken)
        lines.append(f"| {count} | {median * 1e3:.3f} ± {spread * 1e3:.3f} | {median / count * 1e6:.2f} |")
    return lines


def machine() -> dict[str, Any]:
    """What this ran on."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "load": os.getloadavg(),
    }


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer steps; for trying things out")
    parser.add_argument(
        "--only", choices=["unlike", "slowed", "equal", "measured", "planning", "partition", "view", "longest"]
    )
    options = parser.parse_args()
    folder = options.out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-bench"
    folder.mkdir(parents=True)
    blocks = 4 if options.quick else 10
    parts = {
        "planning": lambda: planning(folder, 60),
        "unlike": lambda: unlike(folder, blocks),
        "slowed": lambda: slowed(folder, 7),
        "equal": lambda: equal(folder, 2 * blocks),
        "measured": lambda: measured(folder, 2 * blocks),
        "partition": partitioning,
        "view": viewing,
        "longest": longest,  # by name alone: it takes 12 GB of disk
    }
    text = [f"Machine: {json.dumps(machine())}", ""]
    for name, part in parts.items():
        if options.only == name or (options.only is None and name != "longest"):
            lines = part()
            print("\n".join([*lines, ""]), flush=True)
            text += [*lines, ""]
    (folder / "table.md").write_text("\n".join(text))
    print(f"record: {folder}")


main()
