"""`paceline trace`: a run for the tools people already have."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from paceline.cli.screen import read_runs, run_folders, say
from paceline.errors import ConfigError


@click.command()
@click.argument("run_dir", required=False)
@click.option("-o", "--out", help="Trace file. [default: RUN_DIR/trace.json]")
@click.option("--tensorboard", help="Write scalars to this TensorBoard folder instead.")
@click.option("--steps", help="FIRST:LAST, steps of the trace. [default: all, or the newest that a viewer can open]")
def command(run_dir: str | None, out: str | None, tensorboard: str | None, steps: str | None) -> None:
    """Turn a run into a trace for Perfetto and chrome://tracing, with all workers on one clock.

    Without RUN_DIR: the newest run under `runs/`.
    """
    given = [] if run_dir is None else [run_dir]
    if tensorboard is not None:
        if out is not None or steps is not None:
            raise click.UsageError("-o and --steps are for a trace, --tensorboard for scalars: give one or the other")
        from paceline.report.follow import Follower, workers
        from paceline.runtime.track import to_tensorboard

        (folder,) = run_folders(given)
        files = workers(folder)
        if not files:
            raise ConfigError(f"{folder} has no events")
        tell, count = to_tensorboard(tensorboard), 0
        for event in Follower(files[min(files)]).new():
            with suppress(KeyError, TypeError, ValueError, IndexError):  # a damaged line
                tell(event)
                count += 1
        tell({"type": "end", "t": 0.0})
        say(f"scalars of {count} events in {tensorboard}; tensorboard --logdir {tensorboard} shows them")
        return
    from paceline.report.trace import first_step, write

    chosen = _chosen(steps)
    (run,) = read_runs(given)
    first, last = chosen or (first_step(run), max(run.last_step, 0))
    if chosen and first > run.last_step:
        raise ConfigError(f"--steps must begin at a step of the run, got {steps}: its last is {run.last_step}")
    path = Path(out) if out else run.folder / "trace.json"
    count = write(run, path, first, last)
    apart = max((abs(value) for value in run.offsets().values()), default=0.0)
    if unknown := run.clocks_unknown:
        say(
            f"clocks of workers {', '.join(map(str, unknown))} could not be compared: they share no moment with the first"
        )
    if first and not chosen:
        say(f"only the newest steps, from {first} on, as a viewer opens no more; --steps FIRST:LAST chooses others")
    say(
        f"{count} entries in {path}; clocks were up to {apart * 1e3:.1f} ms apart. Open it at ui.perfetto.dev or chrome://tracing"
    )


def _chosen(steps: str | None) -> tuple[int, int] | None:
    if steps is None:
        return None
    first, colon, last = steps.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"--steps must be FIRST:LAST, two steps in order such as 100:200, got {steps!r}")
    return int(first), int(last)
