"""One picture per case of a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bench.table import limit, middle, of_case, rates

COLOURS = (
    "#4c72b0",
    "#dd8452",
    "#55a868",
    "#c44e52",
    "#8172b3",
    "#937860",
    "#da8bc3",
    "#8c8c8c",
    "#ccb974",
    "#64b5cd",
    "#2f4b7c",
    "#7a5195",
)


def draw(record: dict[str, Any], folder: Path) -> None:
    """Rates beside the limit (or, where contenders differ in their batch, time to the target), and score over training time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sized = record["suite"].get("samples") is not None
    for case in record["cases"]:
        by_name = {name: runs for name, runs in of_case(record, case).items() if name == "solo" or rates(runs)}
        alone = by_name.pop("solo")
        total = None if sized else limit(alone)
        if not by_name:
            continue
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for place, (name, runs) in enumerate(reversed(by_name.items())):
            lap, hue = divmod(len(by_name) - 1 - place, len(COLOURS))
            colour, style = COLOURS[hue], ("-", "--", ":")[lap % 3]  # more contenders than colours
            shown = rates(runs, "time_to_target_s" if sized else "samples_per_s")
            value, spread = middle(shown) if shown else (0.0, 0.0)
            left.barh(
                place, value, xerr=spread, color=colour, hatch="//" if lap else None, edgecolor="white", linewidth=0
            )
            share = f"{value:.0f}" + (f" ({value / total:.0%})" if total else " s" if sized else "")
            label: dict[str, Any] = {"va": "center", "fontsize": 8}
            if shown:
                back = {"facecolor": colour, "edgecolor": "none", "pad": 1.0}
                left.text(value * 0.97, place, share, ha="right", color="white", bbox=back, **label)
            else:
                left.text(0, place, " not reached", **label)
            tests = next(run["figures"]["tests"] for run in runs if run["status"] == "ok")
            times, scores = [t for _, t, _ in tests], [s for _, _, s in tests]
            right.plot(times, scores, color=colour, linestyle=style, label=name, linewidth=1.3)
        left.set_yticks(range(len(by_name)), list(reversed(by_name)))
        if total:
            left.axvline(total, color="black", linestyle="--", linewidth=1)
            left.text(total, len(by_name) - 0.4, "sum of workers alone ", ha="right", fontsize=8)
        key = "time_to_target_s" if sized else "samples_per_s"
        most = max([total or 0.0, *(value for runs in by_name.values() for value in rates(runs, key)), 1e-9])
        left.set_xlim(0, 1.18 * most)
        left.set_xlabel(f"seconds to the target of {case['target']:g}" if sized else "samples/s")
        right.axhline(case["target"], color="grey", linestyle=":", linewidth=1)
        right.set_xlabel("seconds of training (first seed)")
        right.set_ylabel("test accuracy" if case["higher_is_better"] else "test loss")
        handles, labels = right.get_legend_handles_labels()
        right.legend(handles[::-1], labels[::-1], fontsize=7)
        figure.suptitle(f"{case['workload']} on {case['cluster']}: {case['description']}", fontsize=9)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"{case['workload']}@{case['cluster']}.png", dpi=110)
        pyplot.close(figure)
