"""The terminal while workers run: their output above, one line of progress below."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.comm.launch import Screen
from paceline.errors import ConfigError
from paceline.events import events_path

if TYPE_CHECKING:
    from paceline.report.run import Run

CLEAR = "\r\x1b[K"
_LOOK_S = 0.5


class ProgressScreen(Screen):
    """Shows one line of progress on a terminal; without a terminal only the workers' output.

    Args:
        status: the line, or "" while there is nothing to say.
        quiet: leave out the workers' standard output.
    """

    def __init__(self, status: Callable[[], str], *, quiet: bool = False) -> None:
        self._status, self._quiet = status, quiet
        self._live = sys.stderr.isatty()
        self._shown = ""
        self._next = 0.0

    def out(self, text: str) -> None:
        """Worker output, above the line."""
        if not self._quiet:
            self._clear()
            super().out(text)

    def err(self, text: str) -> None:
        """Worker errors, above the line."""
        self._clear()
        super().err(text)

    def tick(self) -> None:
        """Redraw the line, twice a second."""
        if self._live and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.5
            line = self._status()[: shutil.get_terminal_size().columns - 1]
            if line and line != self._shown:
                sys.stderr.write(CLEAR + line)
                sys.stderr.flush()
                self._shown = line

    def _clear(self) -> None:
        if self._shown:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()
            self._shown = ""

    def done(self) -> None:
        """Remove the line."""
        self._clear()


def run_status(run_dir: Path) -> Callable[[], str]:
    """The progress line of a run, from worker 0's events: step, samples/s, efficiency, split."""
    from paceline.report.follow import Follower

    events, last = Follower(events_path(run_dir, 0), newest=2**20), dict[str, dict[str, Any]]()

    def line() -> str:
        last.update({event["type"]: event for event in events.new()})
        window, plan = last.get("window"), last.get("plan")
        if window is None or plan is None:
            return ""
        try:
            efficiency = window.get("efficiency")
            share = f" · {efficiency:.0%} of the workers' own rates" if efficiency is not None else ""
            split = " ".join(map(str, plan["split"]))
            return f"step {window['step']} · {window['samples_per_s']:.0f} samples/s{share} · split {split}"
        except (KeyError, TypeError, ValueError):
            return ""  # damaged: no reason to stop what the workers print

    return line


def new_run_dir(given: str | None, name: str) -> Path:
    """The run folder asked for, or a dated one under `runs/`; made, and checked to be writable."""
    path = Path(given) if given else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run folder must be writable: cannot write {path} ({error.strerror}). Choose another with --run-dir"
        ) from error
    return path.resolve()


def checked_script(script: str) -> Path:
    """The script's path."""
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"the script must be a file: there is no {script}")
    return path


def say(text: str) -> None:
    """A line of paceline's own, on standard error so that standard output stays the script's."""
    click.echo(f"paceline: {text}", err=True)


def run_folders(given: Sequence[str]) -> list[Path]:
    """The run folders asked for, or the newest under `runs/`."""
    from paceline.report.follow import newest, workers

    folders = [Path(one) for one in given] or [newest(Path("runs"))]
    for folder in folders:
        workers(folder)  # says so if it is not there
    return folders


def read_runs(given: Sequence[str]) -> list[Run]:
    """The runs asked for, read to their end; a terminal shows how far that is."""
    from paceline.report.run import runs_in

    runs = runs_in(run_folders(given))
    screen = ProgressScreen(lambda: f"reading {run.name}: {run.read_share:.0%}")
    for run in runs:
        while run.update(_LOOK_S) and run.read_share < 1:
            screen.tick()
    screen.done()
    return runs
