"""`paceline partition`: shards that follow speed and look alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from paceline.cli.screen import say
from paceline.errors import ConfigError


@click.command()
@click.option("--features", required=True, type=click.Path(dir_okay=False), help="A .npy matrix, one row per sample.")
@click.option("--labels", type=click.Path(dir_okay=False), help="A .npy vector of classes or numbers, or a 0/1 matrix.")
@click.option("--speeds", required=True, help="Speeds of the parts: 1,2,3.")
@click.option(
    "--method",
    default="auto",
    show_default=True,
    help="auto, balanced, exact, stratified, contiguous, random, rcd, rcd-cut.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same plan.")
@click.option("--columns", type=int, help="Look at so many principal components only; for raw inputs.")
@click.option("--refine-s", type=float, default=0.0, help="Seconds to spend on swaps afterwards.")
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Folder for the plan and its picture.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON, and nothing else, on standard output."
)
def command(
    features: str,
    labels: str | None,
    speeds: str,
    method: str,
    seed: int,
    columns: int | None,
    refine_s: float,
    out: str,
    as_json: bool,
) -> None:
    """Divide samples into shards sized by speed, balanced by class, and alike in feature space."""
    from importlib.util import find_spec

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.policies.partition import chosen
    from paceline.shards import partition

    chosen(method, 1)
    matrix, classes = _array(features), _array(labels) if labels else None
    shown = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True, disable=as_json) as bar:
        task = bar.add_task("features", total=1.0)
        plan = partition(
            matrix,
            classes,
            speeds=_speeds(speeds),
            method=method,
            seed=seed,
            refine_s=refine_s,
            columns=columns,
            tell=lambda what, share: bar.update(task, description=what, completed=share),
        )
    plan.save(out)
    sizes = [len(plan.samples(part)) for part in range(plan.num_parts)]
    if find_spec("matplotlib") is not None:
        from paceline.report.shards import draw

        draw(plan, Path(out) / "plan.png")
    if as_json:
        click.echo(json.dumps({"method": plan.method, "sizes": sizes, **plan.metrics, "out": out}))
        return
    click.echo(f"{'part':>5} {'speed':>8} {'samples':>9}")
    for part, size in enumerate(sizes):
        click.echo(f"{part:>5} {plan.speeds[part]:>8g} {size:>9}")
    click.echo(
        f"{plan.method}: class mix within {plan.metrics['class_total_variation']:.2%} of the whole; distance in feature space "
        f"{plan.metrics['mmd_ratio']:.3f} of a random division's"
    )
    say(f"plan in {out}")


def _speeds(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"numbers with commas between, as in 1,2,3; got {text!r}") from None


def _array(path: str) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}: save the array with numpy.save") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} must be a .npy file of plain numbers: {error}") from None
