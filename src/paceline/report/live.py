"""A run on one screen: a row a worker, where its time goes, and what was decided last."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.report.run import PHASES, Run

# Each phase has a shape of its own, for screens without colour.
LOOK = {
    "data": ("▒", "yellow"),
    "compute": ("█", "green"),
    "waiting": ("·", "red"),
    "exchange": ("░", "blue"),
    "optimizer": ("▓", "cyan"),
}
_NARROW = 72
_AROUND = 14  # lines that are not workers


def recent(run: Run) -> list[dict[str, Any]]:
    """Per worker, from its newest steps: samples, and seconds per step in each phase."""
    window = run.window
    exchange = window.exchange_s if window is not None else 0.0
    rows: list[dict[str, Any]] = []
    for rank in range(run.size):
        worker = run.workers.get(rank)
        steps = list(worker.recent)[-16:] if worker is not None else []
        if steps:
            samples, data, compute, waited, optimizer = (
                sum(step[place] for step in steps) / len(steps) for place in range(2, 7)
            )
            seconds = {"data": data, "compute": compute, "optimizer": optimizer}
        elif window is not None and rank < len(window.waiting_s):  # no file of its own: what the others heard
            samples, waited = window.samples[rank], window.waiting_s[rank] + exchange
            seconds = {"data": 0.0, "compute": window.busy_s[rank], "optimizer": 0.0}
        else:
            rows.append({"worker": rank, "samples": None, "phases": None})
            continue
        least = min(exchange, waited)
        seconds |= {"exchange": least, "waiting": waited - least}
        rows.append({"worker": rank, "samples": samples, "phases": {name: seconds[name] for name in PHASES}})
    return rows


def glyph(name: str, plain: bool) -> str:
    """The sign of a phase."""
    return name[0] if plain else LOOK[name][0]


def bar(phases: dict[str, float], longest: float, width: int, plain: bool = False) -> Text:
    """The phases of a step, one after the other; `longest` fills the width, `plain` takes letters."""
    text, filled, passed = Text(), 0, 0.0
    for name in PHASES:
        passed += phases[name]
        upto = round(width * passed / longest) if longest > 0 else 0
        text.append(glyph(name, plain) * (upto - filled), style=LOOK[name][1])
        filled = upto
    text.append(" " * (width - filled))
    return text


def frame(
    run: Run, width: int, height: float = math.inf, now: float | None = None, plain: bool = False
) -> RenderableType:
    """Everything, for a screen of that size; `plain` for one that shows letters only."""
    status = run.status(now)
    if status == "empty":
        return Text(f"{run.folder}: nothing written yet")
    rows = recent(run)
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    narrow = width < _NARROW
    table.add_column("worker", justify="right", no_wrap=True)
    table.add_column("split", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    space = max(8, width - (22 if narrow else 34))
    longest = max((sum(row["phases"].values()) for row in rows if row["phases"]), default=0.0)
    shown = rows[: int(min(len(rows), max(1, height - _AROUND)))]
    for row in shown:
        rank = row["worker"]
        if row["phases"] is None:
            cells: list[Any] = [str(rank), "", *([] if narrow else [""]), "", Text("no events", style="dim")]
        else:
            busy = sum(row["phases"][name] for name in ("data", "compute", "optimizer"))
            split = run.split[rank] if rank < len(run.split) else round(row["samples"])
            own = f"{row['samples'] / busy:.0f}" if busy > 0 else ""
            took = f"{sum(row['phases'].values()) * 1e3:.0f}"
            drawn = bar(row["phases"], longest, space, plain)
            cells = [str(rank), str(split), *([] if narrow else [own]), took, drawn]
        table.add_row(*cells)
    lines: list[RenderableType] = [_headline(run, status, now, plain), table]
    if len(rows) > len(shown):
        lines.append(Text(f"and {len(rows) - len(shown)} workers more", style="dim"))
    legend = Text("  ".join(f"{glyph(name, plain)} {name}" for name in PHASES), style="dim")
    lines.append(legend)
    if run.decisions:
        lines.append(Text(""))
    newest = list(run.decisions)[-4:]
    for said in newest:
        who = f" worker {said.worker}" if said.worker >= 0 else ""
        line = f"step {said.step} {said.kind}{who}: {said.text}" if said.step >= 0 else f"{said.kind}{who}: {said.text}"
        if plain:
            line = line.encode("ascii", "replace").decode()
        last = said is newest[-1]  # in full
        lines.append(Text(line, overflow="fold" if last else "crop" if plain else "ellipsis", no_wrap=not last))
    return Group(*lines)


def _headline(run: Run, status: str, now: float | None, plain: bool) -> RenderableType:
    window = run.window
    parts = [f"[bold]{escape(run.name)}[/bold]", status]
    if status == "silent":
        parts[-1] += f" for {(time.time() if now is None else now) - run.written:.0f} s"
    if run.read_share < 0.99:
        parts.append(f"[dim]{run.read_share:.0%} read[/dim]")
    parts.append(f"step {run.last_step}" if run.last_step >= 0 else "no step yet")
    if window is not None:
        speed = f"{window.samples_per_s:.0f} samples/s"
        if window.limit:
            speed += f" of {window.limit:.0f} ({window.samples_per_s / window.limit:.0%})"
        parts.append(speed)
    if run.split:
        parts.append(f"batch {sum(run.split)}")
    if run.losses:
        epoch = max(run.losses)
        total, count, *_ = run.losses[epoch]
        parts += [f"loss {total / count:.4g} (epoch {epoch})"] if count else []
    for rank, number in (("missing", len(run.missing)), ("damaged lines", run.damaged), ("dropped", run.dropped)):
        parts += [f"[red]{number} {rank}[/red]"] if number else []
    text = (" | " if plain else " · ").join(parts)
    return Text.from_markup(text.encode("ascii", "replace").decode() if plain else text, overflow="fold")
