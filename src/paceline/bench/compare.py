"""Two records of one suite, side by side."""

from __future__ import annotations

from typing import Any

from paceline.bench.table import limit, middle, of_case, rates


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per case and contender that both records have.

    `ratio` is samples/s after over before. Two machines are never equally fast, so `efficiency_ratio` compares shares of each
    record's own solo sum; it is None where a record has none. `verdict` calls out what differs by more than both spreads.
    """
    rows = []
    for case in after["cases"]:
        if not any(case["workload"] == c["workload"] and case["cluster"] == c["cluster"] for c in before["cases"]):
            continue
        old, new = of_case(before, case), of_case(after, case)
        limits = limit(old["solo"]), limit(new["solo"])
        for name in new:
            first, second = (
                rates(old.get(name, [])) if name != "solo" else [],
                rates(new[name]) if name != "solo" else [],
            )
            if not first or not second:
                continue
            (a, a_spread), (b, b_spread) = middle(first), middle(second)
            noise = a_spread / a + b_spread / b + 0.01
            efficiency = (b / limits[1]) / (a / limits[0]) if limits[0] and limits[1] else None
            judged = efficiency if efficiency is not None else b / a
            rows.append(
                {
                    "workload": case["workload"],
                    "cluster": case["cluster"],
                    "contender": name,
                    "before_samples_per_s": a,
                    "after_samples_per_s": b,
                    "ratio": b / a,
                    "efficiency_ratio": efficiency,
                    "noise": noise,
                    "verdict": "same" if abs(judged - 1) <= noise else "faster" if judged > 1 else "slower",
                }
            )
    return rows
