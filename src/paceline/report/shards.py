"""A picture of a shard plan: the class mix of every part, and where its samples lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.policies.partition.spread import standardised
from paceline.shards import ShardPlan

_SHOWN = 2000  # points per part
_CLASSES = 10  # with a colour of their own


def draw(plan: ShardPlan, path: Path) -> None:
    """Write the picture; needs matplotlib, and the plan's features for the lower row."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    sizes = np.bincount(plan.parts, minlength=plan.num_parts)
    have = np.zeros_like(plan.quota)
    np.add.at(have, (plan.classes, plan.parts), 1)
    order = np.argsort(-have.sum(axis=1), kind="stable")
    colours = plt.get_cmap("tab10")(np.arange(_CLASSES))
    rows = 2 if plan.data is not None else 1
    shown = min(plan.num_parts, 8)
    figure, axes = plt.subplots(rows, max(shown, 2), figsize=(2.2 * max(shown, 2), 2.6 * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    grid = axes[0, 0].get_gridspec()
    bars = figure.add_subplot(grid[0, :])
    bottom = np.zeros(plan.num_parts)
    for place, number in enumerate(order):
        mix = have[number] / np.maximum(sizes, 1)
        bars.bar(
            range(plan.num_parts),
            mix,
            0.8,
            bottom=bottom,
            color=colours[place % _CLASSES],
            edgecolor="white",
            linewidth=0.5,
        )
        bottom += mix
    bars.set_xticks(range(plan.num_parts), [f"part {p}\n{sizes[p]} samples" for p in range(plan.num_parts)], fontsize=8)
    bars.set_ylabel("class mix")
    bars.set_title(f"{plan.method}: MMD {plan.metrics['mmd_ratio']:.3f} of a random division", fontsize=10)
    bars.spines[["top", "right"]].set_visible(False)
    if plan.data is not None:
        flat = _plane(standardised(plan.data[0]))
        limits = np.quantile(flat, [0.005, 0.995], axis=0)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        for part in range(shown):
            axis = axes[1, part]
            chosen = plan.samples(part)[:: max(1, sizes[part] // _SHOWN)]
            axis.axis("on")
            axis.scatter(*flat[chosen].T, s=2, color=colours[rank[plan.classes[chosen]] % _CLASSES], linewidths=0)
            axis.set(xlim=limits[:, 0], ylim=limits[:, 1], xticks=[], yticks=[])
            axis.set_title(f"part {part}", fontsize=8)
    figure.tight_layout()
    half = path.with_name(f".{path.name}")
    figure.savefig(half, dpi=110, format="png")
    plt.close(figure)
    half.replace(path)


def _plane(features: np.ndarray) -> np.ndarray:
    """The first two principal components, found on a part of the data if it is large."""
    some = features[:: max(1, len(features) // 20000)]
    _, _, axes = np.linalg.svd(some - some.mean(axis=0), full_matrices=False)
    flat = features @ axes[:2].T
    return flat if flat.shape[1] == 2 else np.column_stack([flat, np.zeros(len(flat))])
