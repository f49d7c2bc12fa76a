"""Tables from records: median and spread over the runs of all seeds. What failed stands in them too."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from typing import Any


def middle(values: Iterable[float]) -> tuple[float, float]:
    """Median, and half the distance from least to most.

    >>> middle([1.0, 2.0, 4.0])
    (2.0, 1.5)
    """
    found = sorted(values)
    return statistics.median(found), (found[-1] - found[0]) / 2


def of_case(record: dict[str, Any], case: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs of a case by contender, in the suite's order; `solo` first."""
    chosen = [run for run in record["runs"] if all(run[key] == case[key] for key in ("workload", "cluster"))]
    return {
        name: [run for run in chosen if run["contender"] == name] for name in ("solo", *record["suite"]["contenders"])
    }


def limit(runs: list[dict[str, Any]], how: str = "alone") -> float | None:
    """The workers' solo rates added up; median over seeds."""
    sums = [sum(run["solo"][f"{how}_per_s"]) for run in runs if run["status"] == "ok"]
    return statistics.median(sums) if sums else None


def rates(runs: list[dict[str, Any]], key: str = "samples_per_s") -> list[float]:
    """A figure of all runs that gave it."""
    return [run["figures"][key] for run in runs if run["status"] == "ok" and run["figures"].get(key) is not None]


def tables(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [f"# {record['suite']['name']}", "", preamble(record)]
    for case in record["cases"]:
        lines += ["", *case_table(record, case)]
    return "\n".join(lines) + "\n"


def preamble(record: dict[str, Any]) -> str:
    """What was run, when and on what."""
    suite, host = record["suite"], record["machine"]
    where = f"{host['cores']} cores" + (f", {host['gpu']}" if host.get("gpu") else "")
    tools = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name != "numpy")
    length = f"{suite['samples']} samples" if suite.get("samples") else f"{suite['steps']} steps"
    seeds = len({run["seed"] for run in record["runs"] if run["contender"] != "solo"})
    return (
        f"{suite['description']}.\n\n{record['started'][:10]}; {where}; {tools}, Python {host['python']}. {length} a run, {seeds} {'seed' if seeds == 1 else 'seeds'}, the first {suite['warm_up'] + 1} steps left out of samples/s. Median ± "
        f"half the range over seeds."
    )


def headline(record: dict[str, Any], case: dict[str, Any]) -> list[str]:
    """A short table of one case."""
    by_name = of_case(record, case)
    total = limit(by_name["solo"])
    lines = ["| | samples/s | of the workers' own rates | time to target |", "|---|---|---|---|"]
    for name, runs in by_name.items():
        if name == "solo" or not rates(runs):
            continue
        speed = statistics.median(rates(runs))
        share = f"{speed / total:.0%}" if total else ""
        lines.append(f"| {name} | {speed:.0f} | {share} | {_to_target(runs)} |".replace(" |  |", " | |"))
    missing = [f"{name}: {_why(runs)}" for name, runs in by_name.items() if name != "solo" and not rates(runs)]
    return lines + ([""] if missing else []) + missing


def case_table(record: dict[str, Any], case: dict[str, Any]) -> list[str]:
    """The lines of one case: heading, limit, contenders, published figures."""
    by_name = of_case(record, case)
    total, together = limit(by_name["solo"]), limit(by_name["solo"], "together")
    sized = record["suite"].get("samples") is not None
    known = any(rates(runs, "share_of_optimum") for name, runs in by_name.items() if name != "solo")
    linked = any(rates(runs, "link_bytes") for name, runs in by_name.items() if name != "solo")
    exchanged = sized and any(any(rates(runs, "rounds")) for name, runs in by_name.items() if name != "solo")
    better = "at least" if case["higher_is_better"] else "at most"
    lines = [
        f"## {case['workload']} on {case['cluster']}",
        "",
        f"{case['description']} ({case['mechanism']}). Global batch {case['batch_size']}; target: test score {better} "
        f"{case['target']:g}.",
    ]
    if total and together:
        samples = next(run["solo"]["samples"] for run in by_name["solo"] if run["status"] == "ok")
        lines += [
            "",
            f"Workers alone with their hand-tuned shares {samples}: {total:.0f} samples/s in all; "
            f"all at once without exchange: {together:.0f}.",
        ]
    else:
        lines += ["", f"Workers alone: {_why(by_name['solo'])}."]
    head = [
        "contender",
        "median step, ms",
        *(["steps", "mean batch"] if sized else []),
        *(["rounds"] if exchanged else []),
        "samples/s",
    ]
    head += [] if sized else ["of solo sum"]  # measured with one batch; others have more samples to a step's fixed cost
    head += ["of optimum"] if known else []
    head += [*(["MB per step over a link"] if linked else []), "time to target", "final score"]
    tested = any(rates(runs, "final_loss") for name, runs in by_name.items() if name != "solo")
    head += [*(["final test loss"] if tested else []), "plans", "last split"]
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, runs in by_name.items():
        if name == "solo":
            continue
        rate = rates(runs)
        if not rate:
            lines.append(f"| {name} | {_why(runs)}" + " |" * (len(head) - 1))
            continue
        step, spread = middle(rates(runs, "median_step_s"))
        speed, speed_spread = middle(rate)
        row = [name, f"{step * 1e3:.1f} ± {spread * 1e3:.1f}"]
        row += [f"{statistics.median(rates(runs, key)):.0f}" for key in ("steps", "mean_batch")] if sized else []
        row += [f"{statistics.median(rates(runs, 'rounds') or [0]):.0f}"] if exchanged else []
        row.append(f"{speed:.0f} ± {speed_spread:.0f}")
        if not sized:
            row.append(f"{speed / total:.3f}" if total else "")
        if known:
            row.append(f"{statistics.median(rates(runs, 'share_of_optimum')):.3f}")
        if linked:
            row.append(f"{statistics.median(rates(runs, 'link_bytes')) / 1e6:.2f}")
        row += [_to_target(runs), _score(runs), *([_score(runs, "final_loss")] if tested else [])]
        row += [str(max(rates(runs, "plans"))), str(rates_split(runs))]
        failed = [run for run in runs if run["status"] != "ok"]
        if failed:
            row[0] += f" ({len(failed)} of {len(runs)} runs: {_why(failed)})"
        lines.append(f"| {' | '.join(row)} |")
    return lines + _published(record, case, by_name)


def _published(record: dict[str, Any], case: dict[str, Any], by_name: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = []
    for paper in record["suite"]["paper"]:
        ours, base = rates(by_name[paper["contender"]]), rates(by_name[paper["against"]])
        if paper["cluster"] == case["cluster"] and ours and base:
            here = statistics.median(base) / statistics.median(ours)
            lines.append(
                f"| {paper['contender']} / {paper['against']} | {paper['time_ratio']:.3f} | {here:.3f} | {paper['source']} |"
            )
    if lines:
        lines = [
            "",
            "| time for the same samples | reference | here | where the reference is from |",
            "|---|---|---|---|",
            *lines,
        ]
    return lines


def _to_target(runs: list[dict[str, Any]]) -> str:
    done = [run["figures"]["time_to_target_s"] for run in runs if run["status"] == "ok"]
    reached = [one for one in done if one is not None]
    if not reached:
        return "not reached"
    value, spread = middle(reached)
    text = f"{value:.1f} ± {spread:.1f} s"
    return text if len(reached) == len(done) else f"{text} ({len(reached)} of {len(done)})"


def _score(runs: list[dict[str, Any]], key: str = "final_score") -> str:
    found = rates(runs, key)
    return f"{statistics.median(found):.3f}" if found else ""


def rates_split(runs: list[dict[str, Any]]) -> list[int]:
    """The last split of the first run that went through."""
    return next(run["figures"]["split"] for run in runs if run["status"] == "ok")


def _why(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "no run"
    lines = runs[0].get("reason", "").strip().splitlines() or [""]
    last = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])
    return f"{runs[0]['status']}: {last}".replace("|", "/")[:160]
