"""`paceline trace`: a run for the tools people already have."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.screen import run_folder, say


@click.command()
@click.argument("run_dir", required=False)
@click.option("-o", "--out", help="Trace file. [default: RUN_DIR/trace.json]")
@click.option("--tensorboard", help="Write scalars to this TensorBoard folder instead.")
def command(run_dir: str | None, out: str | None, tensorboard: str | None) -> None:
    """Turn a run into a trace for Perfetto and chrome://tracing, with all workers on one clock.

    Without RUN_DIR: the newest run under `runs/`.
    """
    from paceline.report.run import Run

    folder = run_folder(run_dir)
    if tensorboard is not None:
        if out is not None:
            raise click.UsageError("-o is for a trace, --tensorboard for scalars: give one of them")
        from paceline.errors import ConfigError
        from paceline.report.follow import Follower, workers
        from paceline.runtime.track import to_tensorboard

        files = workers(folder)
        if not files:
            raise ConfigError(f"{folder} has no events")
        tell, count = to_tensorboard(tensorboard), 0
        for event in Follower(files[min(files)]).new():
            tell(event)
            count += 1
        tell({"type": "end", "t": 0.0})
        say(f"scalars of {count} events in {tensorboard}; tensorboard --logdir {tensorboard} shows them")
        return
    from paceline.report.trace import write

    run = Run(folder)
    run.update()
    path = Path(out) if out else folder / "trace.json"
    count = write(run, path)
    apart = max((abs(value) for value in run.offsets().values()), default=0.0)
    say(
        f"{count} entries in {path}; clocks were up to {apart * 1e3:.1f} ms apart. Open it at ui.perfetto.dev or chrome://tracing"
    )
