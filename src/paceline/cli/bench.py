"""`paceline bench`: suites of contenders side by side, as records."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from paceline.cli.screen import say
from paceline.errors import ConfigError


class WithDefault(click.Group):
    """`paceline bench SUITE` is `paceline bench run SUITE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `run` before a suite's name."""
        if args and args[0] not in self.commands and args != ["--help"]:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=WithDefault)
def command() -> None:
    """Compare ways to train, side by side: `paceline bench SUITE`."""


@command.command(name="list")
def list_() -> None:
    """List the suites that ship with paceline."""
    from paceline.bench.suite import load, shipped

    width = max(map(len, shipped()))
    for name in shipped():
        suite = load(name)
        runs = len(suite.workloads) * len(suite.clusters) * (len(suite.contenders) + 1) * len(suite.seeds)
        click.echo(f"{name:{width}}  {runs:3} runs: {suite.description}")


@command.command()
@click.argument("suite")
@click.option("--out", type=Path, help="Folder for the record; must not exist. [default: runs/bench/DATE-SUITE]")
@click.option("--contenders", help="Only these of the suite's contenders, with commas between.")
@click.option("--seeds", help="Other seeds, with commas between.")
@click.option("--steps", type=click.IntRange(min=3), help="Other number of steps.")
@click.option("--links", type=click.Choice(["paced"]), help="Emulate links between nodes without root.")
@click.option("--json", "as_json", is_flag=True, help="Print the record's figures as JSON on standard output.")
def run(
    suite: str,
    out: Path | None,
    contenders: str | None,
    seeds: str | None,
    steps: int | None,
    links: str | None,
    as_json: bool,
) -> None:
    """Play SUITE, a name from `paceline bench list` or a TOML file, and write its record."""
    from dataclasses import replace

    from paceline.bench.play import check, play, turns
    from paceline.bench.record import Record
    from paceline.bench.suite import load
    from paceline.bench.table import tables
    from paceline.bench.workloads import workload
    from paceline.cli.lab import check_cluster

    chosen = load(suite)
    if contenders is not None:
        names = list(dict.fromkeys(re.split(r",(?!\w+=)", contenders)))  # settings have commas too: overlap:h=8,delay=2
        for name in names:
            if name not in chosen.contenders:
                raise ConfigError(f"--contenders must be of this suite's {', '.join(chosen.contenders)}; got {name!r}")
        kept = [paper for paper in chosen.paper if {paper.contender, paper.against} <= set(names)]
        chosen = replace(chosen, contenders=tuple(names), paper=tuple(kept))
    if seeds is not None:
        try:
            chosen = replace(chosen, seeds=tuple(dict.fromkeys(int(part) for part in seeds.split(","))))
        except ValueError:
            raise ConfigError(f"--seeds must be whole numbers with commas between, got {seeds!r}") from None
    if steps is not None:
        chosen = replace(chosen, steps=steps, warm_up=min(chosen.warm_up, steps - 2))
    if links == "paced":
        chosen = replace(chosen, clusters=tuple(replace(one, paced_links=True) for one in chosen.clusters))
    for cluster in chosen.clusters:
        check_cluster(cluster)
    check(chosen)
    folder = out or Path("runs") / "bench" / f"{datetime.now():%Y%m%d-%H%M%S}-{chosen.name}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"the record folder must not exist yet: {folder} does. Choose another --out") from None
    except OSError as error:
        raise ConfigError(f"the record folder must be writable: cannot make {folder} ({error.strerror})") from error
    tasks = [(workload(name), cluster) for name in chosen.workloads for cluster in chosen.clusters]
    cases = [
        {
            "workload": task.name,
            "cluster": cluster.name,
            "description": cluster.description,
            "mechanism": cluster.mechanism,
            "batch_size": chosen.batch_size or task.batch_size,
            "target": chosen.target or task.target,
            "higher_is_better": task.higher_is_better,
        }
        for task, cluster in tasks
    ]
    started = f"{datetime.now():%Y-%m-%dT%H:%M:%S}"
    record = Record(folder, chosen.plain(), cases, started)
    raw = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    peers = Path(os.environ.get("PACELINE_PEERS", Path.home() / ".cache" / "paceline" / "peers"))
    bar = _Bar(sum(1 for _ in turns(chosen)), quiet=as_json)

    def tell(turn: Any, one: dict[str, Any]) -> None:
        record.add(one)
        bar.tell(turn, one)

    try:
        with bar:
            play(chosen, raw, peers, tell)
    finally:
        if record.content["runs"]:  # interrupted, it holds what there is
            record.finish(raw)
        else:
            folder.rmdir()
        shutil.rmtree(raw, ignore_errors=True)
    if as_json:
        click.echo(json.dumps({**record.content, "folder": str(folder)}))
    else:
        click.echo(tables(record.content))
    if find_spec("matplotlib") is None:
        say("no plots: they need matplotlib (pip install 'paceline[demo]', then `paceline bench render FOLDER`)")
    say(f"record in {folder}")


@command.command()
@click.argument("folder", type=Path)
def render(folder: Path) -> None:
    """Make the table and plots of the record in FOLDER anew, from its record.json."""
    from paceline.bench.record import read
    from paceline.bench.record import render as make

    drawn = make(read(folder), folder)
    say(f"wrote {folder / 'table.md'}{' and plots' if drawn else '; plots need matplotlib'}")


@command.command()
@click.argument("before", type=Path)
@click.argument("after", type=Path)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(before: Path, after: Path, as_json: bool) -> None:
    """Put two records side by side: what became faster or slower by more than their spread."""
    from paceline.bench.compare import compare as rows_of
    from paceline.bench.record import read

    first, second = read(before), read(after)
    rows = rows_of(first, second)
    if not rows:
        raise ConfigError(f"{before} and {after} have no case and contender in common")
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for header in ("case", "contender", "before", "after", "ratio", "ratio of efficiency", ""):
        table.add_column(header, justify="left" if header in ("case", "contender", "") else "right")
    for row in rows:
        efficiency = row["efficiency_ratio"]
        table.add_row(
            f"{row['workload']}@{row['cluster']}",
            row["contender"],
            f"{row['before_samples_per_s']:.0f}",
            f"{row['after_samples_per_s']:.0f}",
            f"{row['ratio']:.3f}",
            "" if efficiency is None else f"{efficiency:.3f}",
            row["verdict"],
        )
    Console().print(table)
    if first["machine"] != second["machine"]:
        say("the records are of different machines: compare the ratio of efficiency")


class _Bar:
    """A progress bar with the time left, on standard error; a line per run where that is no terminal."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._done, self._total, self._quiet = 0, total, quiet
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal, speed_estimate_period=3600
        )
        self._task = self._progress.add_task("runs", total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, turn: Any, run: dict[str, Any]) -> None:
        """A run has ended."""
        self._done += 1
        self._progress.update(self._task, advance=1, description=f"{turn.contender.name} on {turn.cluster.name}")
        if "figures" in run:
            shown = f"{run['figures']['samples_per_s']:.0f} samples/s"
        elif "solo" in run:
            shown = f"{sum(run['solo']['alone_per_s']):.0f} samples/s in all"
        else:
            shown = f"{run['status']}: {(run.get('reason') or '').strip().splitlines()[-1:]}"
        if not self._quiet:
            place = f"{turn.workload}@{turn.cluster.name} seed {turn.seed}"
            self._console.print(f"{self._done}/{self._total} {turn.contender.name}, {place}: {shown}", markup=False)
