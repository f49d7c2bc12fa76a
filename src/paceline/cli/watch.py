"""`paceline watch`: a run, live in the terminal. Reads its event files and nothing else."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from paceline.cli.screen import run_folders

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.report.run import Run

_OVER = ("ended", "failed")
_NEWEST = 32 * 2**20  # bytes of a long run that a screen needs
_READ = 0.99


@click.command()
@click.argument("run_dir", required=False)
@click.option("--once", is_flag=True, help="Print what there is and end; for scripts.")
@click.option(
    "--every", "every_s", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between looks."
)
def command(run_dir: str | None, once: bool, every_s: float) -> None:
    """See who computes and who waits, while a run goes on.

    Without RUN_DIR: the newest run under `runs/`. Ends with the run, or with Ctrl-C; the run does not notice.
    """
    from rich.console import Console

    from paceline.report.run import Run

    try:
        (folder,) = run_folders([] if run_dir is None else [run_dir])
        _follow(Run(folder, newest=_NEWEST), Console(), once, every_s)
    except KeyboardInterrupt:
        pass  # that is how it ends


def _follow(run: Run, console: Console, once: bool, every_s: float) -> None:
    from rich.live import Live

    from paceline.report.live import frame

    plain = not console.encoding.lower().startswith("utf")
    if once:
        run.update()
        console.print(frame(run, console.width, plain=plain))
        return
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        while True:
            behind = run.update(every_s) and run.read_share < _READ
            if live is not None:
                live.update(frame(run, console.width, console.height, plain=plain), refresh=True)
            elif not behind:  # a pipe: a frame now and then, one below the other
                console.print(frame(run, console.width, plain=plain))
            if behind:
                continue
            if run.status() in _OVER:
                return
            time.sleep(every_s)
