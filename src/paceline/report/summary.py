"""What happened in a run, in figures and in words: the limit, what was reached, who waits for whom, what to try next."""

from __future__ import annotations

import html
from typing import Any

from paceline.report.run import PHASES, Run
from paceline.report.worker import shown

_WORTH = 0.05  # a saving worth a sentence


def figures(run: Run) -> dict[str, Any]:
    """The figures of a run as plain values, since it began last; the first tenth of its steps is left out as warm-up."""
    if run.problem:
        problem = f"This run cannot be read: {run.problem}."
        return {
            "name": run.name,
            "status": "unreadable",
            "problem": run.problem,
            "steps": 0,
            "workers": [],
            "words": [problem],
            "advice": [],
        }
    since = run.begins + max(0, run.last_step - run.begins) // 10
    batch, step_s, able_in = run.windows.mean(since)
    rate = batch / step_s if batch is not None and step_s else None
    able = able_in / step_s if able_in is not None and step_s else None
    exchange = run.exchange.mean(since)[0]
    waits = run.waits.mean(since)[:-1] if run.waits is not None else []
    shares = run.splits.mean(since) if run.splits is not None else []
    workers = []
    for rank in range(run.size):
        worker = run.workers.get(rank)
        own = worker.steps.mean(since) if worker is not None else [None] * 5
        waiting = waits[rank] if rank < len(waits) else None
        phases = dict(zip(PHASES, (own[1], own[2], waiting, exchange, own[4]), strict=True))
        busy = sum(value for value in (own[1], own[2], own[4]) if value is not None) or None
        samples = own[0] if own[0] is not None else (shares[rank] if rank < len(shares) else None)
        workers.append(
            {
                "worker": rank,
                "name": worker.name if worker is not None else str(rank),
                "samples": samples,
                "samples_per_s": samples / busy if samples is not None and busy else None,
                **{f"{phase}_s": value for phase, value in phases.items()},
                "idle_share": waiting / step_s if waiting is not None and step_s else None,
                "last_step": worker.last_step if worker is not None else None,
                "ok": worker.ok if worker is not None else None,
            }
        )
    found = {
        "name": run.name,
        "status": run.status(),
        "num_workers": run.size,
        "logs": shown(str(run.folder / "logs")) if (run.folder / "logs").is_dir() else None,
        "steps": run.last_step + 1,
        "seconds": run.seconds,
        "problem": "",
        "config": {name: run.config.get(name) for name in ("balance", "sync", "batch", "lr_rule", "recipe", "seed")},
        "policies": {name: run.policy(name) for name in ("balance", "sync", "batch")},
        "samples_per_s": rate,
        "limit_samples_per_s": able,
        "share_of_limit": rate / able if rate is not None and able else None,
        "step_s": step_s,
        "exchange_s": exchange,
        "workers": workers,
        "batch": sum(run.split) or None,
        "split": run.split,
        "losses": [
            {"epoch": epoch, "step": int(step), "loss": total / count}
            for epoch, (total, count, step, _) in sorted(run.losses.items())
            if count
        ],
        "rounds": run.num_rounds,
        "round_bytes": run.round_bytes,
        "stragglers": [
            {name: one.get(name) for name in ("worker", "since", "phase", "ratio", "confidence", "text")}
            for one in run.stragglers
        ],
        "decisions": run.num_decisions,
        "clocks_unknown": run.clocks_unknown,
        "missing": run.missing,
        "damaged_lines": run.damaged,
        "dropped_events": run.dropped,
    }
    return {**found, "words": words(found), "advice": advice(found)}


def words(found: dict[str, Any]) -> list[str]:
    """What happened, in sentences."""
    if found["status"] == "empty":
        return ["Nothing has been written to this run folder yet."]
    many = "1 worker" if found["num_workers"] == 1 else f"{found['num_workers']} workers"
    state = {
        "running": "is running",
        "silent": "has no end and is silent: it may have been killed",
        "failed": "has failed",
        "ended": "has ended",
    }[found["status"]]
    said = [f"{found['name']} {state}: {many}, {found['steps']} steps in {_duration(found['seconds'])}."]
    if found["status"] == "failed" and found["logs"]:
        said.append(f"What its workers printed is in {found['logs']}.")
    if found["samples_per_s"]:
        speed = f"{found['samples_per_s']:.0f} samples/s"
        if found["limit_samples_per_s"]:
            speed += (
                f", {found['share_of_limit']:.0%} of the {found['limit_samples_per_s']:.0f} that the workers make by "
                f"themselves with these shares"
            )
        said.append(speed[0].upper() + speed[1:] + ".")
    said += _waiting(found)
    if found["rounds"]:
        sent = found["round_bytes"] / 1e6
        some = " by the workers whose files are here" if found["missing"] else ""
        between = f"; {sent:.3g} MB were sent{some}" if sent else ", within one node"
        said.append(f"{found['rounds']} exchanges of replicas{between}.")
    said += [_fallen(one) for one in found["stragglers"][-3:]]
    if found["losses"]:
        first, last = found["losses"][0], found["losses"][-1]
        later = f", {last['loss']:.4g} in epoch {last['epoch']}" if last is not first else ""
        said.append(f"Loss {first['loss']:.4g} in epoch {first['epoch']}{later}.")
    if found["missing"]:
        said.append(f"No events of workers {', '.join(map(str, found['missing']))}.")
    if found["damaged_lines"] or found["dropped_events"]:
        said.append(
            f"{found['damaged_lines']} damaged lines were passed over; {found['dropped_events']} events were never written."
        )
    return said


def _fallen(one: dict[str, Any]) -> str:
    """Who fell behind; whether it has caught up again since, its share tells."""
    try:
        who = f"Worker {int(one['worker'])}" if int(one["worker"]) >= 0 else "The exchange"
        return (
            f"{who} fell behind at step {int(one['since'])}: {float(one['ratio']):.1f} times as long as before, for "
            f"{shown(str(one['phase']))} (surely no noise: {float(one['confidence']):.0%})."
        )
    except (TypeError, ValueError, OverflowError):
        return shown(str(one["text"]))


def _waiting(found: dict[str, Any]) -> list[str]:
    idle = [(one["idle_share"], one["worker"]) for one in found["workers"] if one["idle_share"] is not None]
    if len(idle) < 2 or not found["step_s"]:
        return []
    most, least = max(idle), min(idle)
    where = f"A step takes {found['step_s'] * 1e3:.1f} ms"
    if found["exchange_s"]:
        where += f", {found['exchange_s'] / found['step_s']:.0%} of it the exchange"
    if most[0] < 0.03:
        return [f"{where}; nobody waits more than {max(most[0], 0):.0%} of it for others."]
    return [f"{where}; worker {most[1]} waits {most[0]:.0%} of it, mostly for worker {least[1]}."]


def advice(found: dict[str, Any]) -> list[str]:
    """What to try next, with what it would save; from the figures alone."""
    said: list[str] = []
    step = found["step_s"]
    workers = [one for one in found["workers"] if one["samples_per_s"]]
    if not step or not workers:
        return said
    balance, sync = found["policies"]["balance"], found["policies"]["sync"]
    exchange = found["exchange_s"] or 0.0
    total = sum(one["samples"] for one in workers)
    best = total / sum(one["samples_per_s"] for one in workers) + exchange
    saving = 1 - best / step
    idle = max(workers, key=lambda one: one["idle_share"] or 0.0)
    if balance != "affine" and saving > _WORTH and (idle["idle_share"] or 0) > _WORTH:
        said.append(
            f"worker {idle['worker']} is idle {idle['idle_share']:.0%} of each step: balance='affine' would save about "
            f"{saving:.0%}"
        )
    if exchange / step > 0.2 and sync == "allreduce" and len(workers) > 1:
        said.append(
            f"the exchange takes {exchange / step:.0%} of each step: sync='overlap' hides it and would save up to that much, if the "
            f"result need not be exact"
        )
    hungry = [one for one in workers if one["data_s"] and one["data_s"] / step > 0.1]
    if hungry:
        names = ", ".join(str(one["worker"]) for one in hungry[:8]) + (" and more" if len(hungry) > 8 else "")
        most = max(one["data_s"] for one in hungry) / step
        said.append(
            f"{'worker' if len(hungry) == 1 else 'workers'} {names} wait{'s' if len(hungry) == 1 else ''} for data, up to {most:.0%} of "
            f"each step: more num_workers in pace.loader would save up to that much"
        )
    return said


def _duration(seconds: float) -> str:
    """
    >>> _duration(75.0), _duration(7322)
    ('75 s', '2 h 2 min')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def markdown(found: dict[str, Any]) -> str:
    """The figures of a run as Markdown."""
    lines = [f"# {_cell(found['name'])}", "", *map(_cell, found["words"])]
    if found["advice"]:
        lines += ["", "What to try next:", "", *(f"* {_cell(one)}" for one in found["advice"])]
    lines += ["", "| worker | samples/step | samples/s by itself | data | compute | waiting | exchange | optimizer |"]
    lines.append("|---" * 8 + "|")
    for one in found["workers"]:
        times = [one[f"{phase}_s"] for phase in PHASES]
        row = [_cell(one["name"]), _number(one["samples"], ".1f"), _number(one["samples_per_s"], ".0f")]
        row += ["" if value is None else f"{value * 1e3:.1f} ms" for value in times]
        lines.append(f"| {' | '.join(row)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A text that Markdown leaves alone."""
    return html.escape(text, quote=False).replace("|", "\\|")


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)
