"""`paceline lab`: scripts on emulated clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from paceline.cli.screen import LastEvents, ProgressScreen, checked_script, new_run_dir, say
from paceline.lab.cluster import Cluster, load, shipped
from paceline.lab.start import lab_dir, run_on


@click.group()
def command() -> None:
    """Run scripts on emulated clusters of unlike machines."""


@command.command()
def clusters() -> None:
    """List the clusters that ship with paceline."""
    width = max(len(cluster.name) for cluster in shipped())
    for cluster in shipped():
        click.echo(
            f"{cluster.name:{width}}  {len(cluster.workers)} workers, {cluster.mechanism}: {cluster.description}"
        )


@command.command(name="run", context_settings={"allow_interspersed_args": False})
@click.option("--cluster", required=True, help="A cluster file, or the name of one that ships.")
@click.option("--balance", help="Balance policy, for scripts that call paceline.init().")
@click.option("--run-dir", help="Folder for events, logs and the lab's record. [default: runs/DATE-SCRIPT]")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON, and nothing else, on standard output."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str, arguments: tuple[str, ...], cluster: str, balance: str | None, run_dir: str | None, as_json: bool
) -> None:
    """Run SCRIPT on every worker of a cluster emulated on this machine."""
    from paceline.policies.balance import policy
    from paceline.report.lab import read_lab

    spec = load(cluster)
    path = checked_script(script)
    if balance is not None:
        policy(balance)
    folder = new_run_dir(run_dir, path.stem)
    say(f"{spec.name}: {len(spec.workers)} workers, mechanism {spec.mechanism}")
    start(spec, path, list(arguments), folder, balance=balance, quiet=as_json)
    figures = read_lab(lab_dir(folder)).summary()
    if as_json:
        click.echo(json.dumps({**figures, "run_dir": str(folder)}, indent=1))
        return
    show(figures)
    say(f"record in {folder}")


def start(
    spec: Cluster,
    script: Path,
    arguments: list[str],
    folder: Path,
    *,
    balance: str | None,
    quiet: bool,
    label: str = "",
) -> None:
    """Run a script on a cluster, with a progress line."""
    settings: dict[str, Any] = {"run_dir": str(folder)}
    if balance is not None:
        settings["balance"] = balance
    caps = [worker.max_local_batch for worker in spec.workers]
    if any(caps):
        settings["max_local_batch"] = caps
    screen = ProgressScreen(lab_status(folder, label), quiet=quiet)
    try:
        run_on(spec, script, arguments, folder, {"PACELINE_CLI": json.dumps(settings)}, screen)
    finally:
        screen.done()


def lab_status(folder: Path, label: str) -> Any:
    """The progress line of a lab run, from the lab's own record."""
    from paceline.report.lab import read_lab

    steps = LastEvents(lab_dir(folder) / "worker-0000.jsonl")

    def line() -> str:
        steps.read()
        if steps.count < 4:
            return ""
        seen = read_lab(lab_dir(folder))
        recent = range(max(2, len(seen.interval_s) - 10), len(seen.interval_s))
        if not recent:
            return ""
        time_s = sum(seen.interval_s[s] for s in recent)
        samples = sum(sum(seen.split[s]) for s in recent)
        share = sum(seen.ideal_s[s] for s in recent) / time_s
        split = " ".join(map(str, seen.split[-1]))
        return f"{label}step {len(seen.interval_s)} · {samples / time_s:.0f} samples/s · {share:.0%} of the limit · split {split}"

    return line


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{figures['cluster']} ({figures['mechanism']})")
    for column in ("worker", "samples/step", "busy ms/step", "idle"):
        table.add_column(column, justify="right")
    for worker in figures["workers"]:
        table.add_row(
            str(worker["worker"]),
            f"{worker['samples_per_step']:.1f}",
            f"{worker['busy_s'] * 1e3:.1f}",
            f"{worker['idle_share']:.0%}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{figures['samples_per_s']:.0f} samples/s, {figures['share_of_limit']:.0%} of the best split's "
        f"{figures['limit_samples_per_s']:.0f}; median step {figures['step_s'] * 1e3:.1f} ms over {figures['steps_counted']} steps"
    )
