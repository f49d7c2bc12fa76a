"""`paceline lab`: scripts on emulated clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from paceline.cli.screen import ProgressScreen, checked_script, new_run_dir, say
from paceline.errors import ConfigError
from paceline.lab.cluster import Cluster


@click.group()
def command() -> None:
    """Run scripts on emulated clusters of unlike machines."""


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def probe(as_json: bool) -> None:
    """Say what this machine can emulate, and what to do about the rest."""
    from paceline.lab.probe import probe as look
    from paceline.lab.start import clean

    left = clean()
    found = look()
    if as_json:
        click.echo(json.dumps([{"mechanism": one.name, "works": one.works, "how": one.sentence} for one in found]))
        return
    for one in found:
        click.echo(f"{one.name:12} {'yes' if one.works else 'no ':3}  {one.sentence}")
    for name in left:
        say(f"removed {name}, left by a lab that was killed")


@command.command()
def clusters() -> None:
    """List the clusters that ship with paceline."""
    from paceline.lab.clusterfile import shipped

    all_of_them = shipped()
    width = max(len(cluster.name) for cluster in all_of_them)
    for cluster in all_of_them:
        nodes = f" on {len(cluster.nodes)} nodes" if len(cluster.nodes) > 1 else ""
        click.echo(
            f"{cluster.name:{width}}  {len(cluster.workers)} workers{nodes}, {cluster.mechanism}: {cluster.description}"
        )


def choose(name: str, links: str | None) -> Cluster:
    """The cluster by name or file, checked against what this machine can do; says what it is."""
    from dataclasses import replace

    from paceline.lab.clusterfile import load

    cluster = load(name)
    if links == "paced":
        cluster = replace(cluster, paced_links=True)
    check_cluster(cluster)
    return cluster


def check_cluster(cluster: Cluster) -> None:
    """Refuse a cluster this machine cannot emulate; say what it is, and warn of one that is too large."""
    from paceline.lab.probe import missing
    from paceline.lab.probe import probe as look
    from paceline.lab.start import overloaded

    if cluster.paced_links and any(one.kind == "drop" for one in cluster.disturbances):
        raise ConfigError(
            f"cluster {cluster.name!r} drops a link, which paced links cannot: run as root, without --links"
        )
    lacking = missing(cluster, look()) if cluster.mechanism != "paced" or cluster.linked else []
    if lacking:
        one = lacking[0]
        raise ConfigError(f"cluster {cluster.name!r} needs {one.name}, which this machine lacks: {one.sentence}")
    say(describe(cluster))
    if warning := overloaded(cluster):
        say(f"warning: {warning}")


def describe(cluster: Cluster) -> str:
    """One line: workers, mechanism, nodes and links."""
    line = f"{cluster.name}: {len(cluster.workers)} workers, mechanism {cluster.mechanism}"
    if len(cluster.nodes) > 1:
        layout = " + ".join(f"{node.name} ({node.num_workers})" for node in cluster.nodes)
        how = "paced links" if cluster.paced_links else "network namespaces" if cluster.linked else "no links"
        line += f", {len(cluster.nodes)} nodes: {layout}, {how}"
    return line


@command.command(name="run", context_settings={"allow_interspersed_args": False})
@click.option("--cluster", required=True, help="A cluster file, or the name of one that ships.")
@click.option("--balance", help="Balance policy, for scripts that call paceline.init().")
@click.option("--sync", help="Sync policy, likewise.")
@click.option("--batch", help="Batch policy, likewise.")
@click.option("--lr-rule", help="The learning rate when the batch changes, likewise.")
@click.option("--recipe", help="A published method, likewise.")
@click.option("--links", type=click.Choice(["paced"]), help="Emulate links between nodes without root.")
@click.option("--run-dir", help="Folder for events, logs and the lab's record. [default: runs/DATE-SCRIPT]")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON, and nothing else, on standard output."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str,
    arguments: tuple[str, ...],
    cluster: str,
    balance: str | None,
    sync: str | None,
    batch: str | None,
    lr_rule: str | None,
    recipe: str | None,
    links: str | None,
    run_dir: str | None,
    as_json: bool,
) -> None:
    """Run SCRIPT on every worker of a cluster emulated on this machine."""
    from paceline.config import check_names
    from paceline.lab.start import lab_dir
    from paceline.report.lab import read_lab

    path = checked_script(script)
    options = {"balance": balance, "sync": sync, "batch": batch, "lr_rule": lr_rule, "recipe": recipe}
    check_names(options)
    spec = choose(cluster, links)
    folder = new_run_dir(run_dir, path.stem)
    start(spec, path, list(arguments), folder, options, quiet=as_json)
    figures = read_lab(lab_dir(folder)).summary()
    if figures["overrun"] > 1.1:
        say(
            f"warning: real arithmetic took up to {figures['overrun']:.1f} times the time of the cluster file: this machine "
            f"cannot carry it. Use fewer workers, larger times, or a smaller model"
        )
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
    options: dict[str, str | None],
    *,
    quiet: bool,
) -> None:
    """Run a script on a cluster, with a progress line."""
    from paceline.lab.start import Start, run_on

    settings: dict[str, Any] = {"run_dir": str(folder), **{k: v for k, v in options.items() if v is not None}}
    caps = [worker.max_local_batch for worker in spec.workers]
    if any(caps):
        settings["max_local_batch"] = caps
    screen = ProgressScreen(lab_status(folder, ""), quiet=quiet)
    try:
        run_on(spec, Start(script, arguments, folder, {"PACELINE_CLI": json.dumps(settings)}), screen)
    finally:
        screen.done()


def lab_status(folder: Path, label: str) -> Any:
    """The progress line of a lab run, from the lab's own record."""
    from paceline.lab.start import lab_dir
    from paceline.report.lab import read_lab

    def line() -> str:
        if not (lab_dir(folder) / "worker-0000.jsonl").exists():
            return ""
        seen = read_lab(lab_dir(folder))
        recent = range(max(2, len(seen.interval_s) - 10), len(seen.interval_s))
        if not recent:
            return ""
        time_s = sum(seen.interval_s[s] for s in recent)
        samples = sum(sum(seen.split[s]) for s in recent)
        share = f" · {sum(seen.ideal_s[s] for s in recent) / time_s:.0%} of the limit" if seen.ideal_s else ""
        split = " ".join(map(str, seen.split[-1]))
        return f"{label}step {len(seen.interval_s)} · {samples / time_s:.0f} samples/s{share} · split {split}"

    return line


@command.command(context_settings={"allow_interspersed_args": False})
@click.option("--cluster", required=True, help="A cluster file, or the name of one that ships.")
@click.option("--steps", type=click.IntRange(min=8), default=20, show_default=True, help="Steps of each worker.")
@click.option("--run-dir", help="Folder for the record. [default: runs/DATE-limit]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def limit(
    script: str, arguments: tuple[str, ...], cluster: str, steps: int, run_dir: str | None, as_json: bool
) -> None:
    """Measure what each worker of a cluster does alone with SCRIPT: their sum is the physical limit.

    Each runs the script in a world of one, with the batch the script asks for.
    """
    from dataclasses import replace

    from paceline.comm.launch import Silent
    from paceline.lab.clusterfile import load
    from paceline.lab.limit import measure
    from paceline.lab.start import Start

    path = checked_script(script)
    # Alone there is nobody to exchange anything with, and no mishaps: what they need is not asked for.
    spec = replace(load(cluster), paced_links=True, disturbances=())
    check_cluster(spec)
    folder = new_run_dir(run_dir, "limit")
    found = []
    for worker in range(len(spec.workers)):
        env = {"PACELINE_CLI": json.dumps({"run_dir": str(folder / f"alone-{worker:04d}")})}
        one = measure(spec, worker, Start(path, list(arguments), folder, env, most_steps=steps), Silent())
        say(f"worker {worker} alone: {one.samples_per_s:.1f} samples/s")
        found.append(one)
    total = sum(one.samples_per_s for one in found)
    if as_json:
        rows = [{**vars(one), "samples_per_s": one.samples_per_s} for one in found]
        click.echo(json.dumps({"workers": rows, "samples_per_s": total, "run_dir": str(folder)}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{spec.name} ({spec.mechanism}): each worker alone")
    for column in ("worker", "samples/step", "step ms", "samples/s"):
        table.add_column(column, justify="right")
    for one in found:
        ms = f"{one.step_s * 1e3:.1f} ± {one.spread_s * 1e3:.1f}"
        table.add_row(str(one.worker), f"{one.samples:.0f}", ms, f"{one.samples_per_s:.1f}")
    console = Console()
    console.print(table)
    console.print(f"all together at most {total:.0f} samples/s")


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
    known = figures["share_of_limit"] is not None
    limit = (
        f", {figures['share_of_limit']:.0%} of the best split's {figures['limit_samples_per_s']:.0f}"
        if known
        else " (`paceline lab limit` measures the limit)"
    )
    console.print(
        f"{figures['samples_per_s']:.0f} samples/s{limit}; median step {figures['step_s'] * 1e3:.1f} ms over {figures['steps_counted']} steps"
    )
