"""`paceline demo`: the same training three ways on an emulated cluster of four unlike workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from paceline.bench.suite import Suite
from paceline.cli.lab import lab_status
from paceline.cli.screen import ProgressScreen, new_run_dir, say
from paceline.errors import ConfigError, LaunchError
from paceline.lab.clusterfile import load

BATCH_SIZE = 128
TARGET = 0.95
NAMES = {"ddp": "plain DDP", "hand-tuned": "hand-tuned DDP", "affine": "paceline"}


@click.command()
@click.option("--steps", type=click.IntRange(min=20), default=120, show_default=True, help="Steps of each run.")
@click.option("--run-dir", help="Folder for the record. [default: runs/DATE-demo]")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON on standard output.")
def command(steps: int, run_dir: str | None, as_json: bool) -> None:
    """See plain DDP, a hand-tuned split and paceline side by side.

    Trains a small convolutional net on scikit-learn's digits on four emulated workers of speeds 1:2:3:4. Halfway, the
    fastest becomes three times slower. Takes about two minutes.
    """
    _need_demo_extra()
    from paceline.bench.play import play
    from paceline.report.contest import draw
    from paceline.report.files import whole
    from paceline.report.page import page
    from paceline.report.run import Run

    base = load("slowed-midway")
    cluster = replace(
        base,
        description=f"speeds 1:2:3:4; the fastest becomes three times slower at step {steps // 2}",
        disturbances=tuple(replace(one, from_step=steps // 2) for one in base.disturbances),
    )
    suite = Suite(
        "demo",
        "plain DDP, a hand-tuned split and paceline",
        ("cnn-digits",),
        (cluster,),
        tuple(NAMES),
        seeds=(1,),
        steps=steps,
        test_every=10,
        warm_up=2,
        batch_size=BATCH_SIZE,
        target=TARGET,
        train_rows=None,
        timeout_s=600,
    )
    folder = new_run_dir(run_dir, "demo")
    say(f"four emulated workers (mechanism {cluster.mechanism}); {cluster.description}")
    watch = _Watch(folder, steps)
    try:
        play(suite, folder, folder, watch.tell, watch.tick, limit=False)
    finally:
        watch.screen.done()
    entries = watch.entries
    picture, report = folder / "demo.png", folder / "report.html"
    draw(entries, "paceline", picture)
    run = Run(watch.places["paceline"], name="paceline on four unlike workers")
    run.update()
    with whole(report) as file:
        file.write(page([run]))
    result = {
        "cluster": cluster.plain(),
        "batch_size": BATCH_SIZE,
        "steps": steps,
        "target_accuracy": TARGET,
        "contenders": [entry.figures(TARGET) for entry in entries],
        "picture": str(picture),
        "report": str(report),
        "run_dir": str(folder),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    if as_json:
        click.echo(json.dumps(result, indent=1))
        return
    _show(result)


class _Watch:
    """Says which contender runs, shows how far it is, and reads what it left."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._turn: Any = None
        self._line: Callable[[], str] = str
        self.screen = ProgressScreen(lambda: self._line(), quiet=True)
        self.entries: list[Any] = []
        self.places: dict[str, Path] = {}

    def tick(self, turn: Any) -> None:
        """A run is under way."""
        if turn != self._turn:
            self._turn, name = turn, NAMES[turn.contender.name]
            say(f"{len(self.entries) + 1} of {len(NAMES)}: {name}, {self._steps} steps of {BATCH_SIZE} samples")
            self._line = lab_status(self._folder / turn.place, f"{name}: ")
        self.screen.tick()

    def tell(self, turn: Any, run: dict[str, Any]) -> None:
        """A run has ended."""
        from paceline.report.contest import read_entry

        name = NAMES[turn.contender.name]
        if run["status"] != "ok":
            raise LaunchError(f"{name} {run['status']}: {run['reason']}")
        self.places[name] = self._folder / turn.place
        self.entries.append(read_entry(name, self.places[name]))


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['steps']} steps of {result['batch_size']} samples")
    headers = ("", "samples/s", "share of limit", f"time to {result['target_accuracy']:.0%}", "final accuracy")
    for header in headers:
        table.add_column(header, justify="right" if header else "left")
    for one in result["contenders"]:
        reached = one["time_to_target_s"]
        table.add_row(
            one["name"],
            f"{one['samples_per_s']:.0f}",
            f"{one['share_of_limit']:.0%}",
            "not reached" if reached is None else f"{reached:.1f} s",
            f"{one['final_accuracy']:.1%}",
        )
    console = Console()
    console.print(table)
    console.print("limit: the best split of each step's batch, were communication free", style="dim")
    click.echo(f"picture: {result['picture']}")
    click.echo(
        f"report of paceline's run: {result['report']} (open it with a browser; `paceline watch` shows a run live)"
    )
    click.echo(f"run folder: {result['run_dir']}")


def _need_demo_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("sklearn", "matplotlib", "plotly") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {' and '.join(missing)}: pip install 'paceline[demo]'")
