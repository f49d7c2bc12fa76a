"""`paceline report`: what happened in a run, as one file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from paceline.cli.screen import read_runs, say


@click.command()
@click.argument("run_dirs", nargs=-1)
@click.option("-o", "--out", help="File to write. [default: RUN_DIR/report.html; md and json go to standard output]")
@click.option("--format", "kind", type=click.Choice(["html", "md", "json"]), default="html", show_default=True)
def command(run_dirs: tuple[str, ...], out: str | None, kind: str) -> None:
    """Say what happened in a run: the limit, what was reached, where the time went, what to try next.

    Several run folders stand side by side. Without any: the newest run under `runs/`. The HTML file needs nothing else and no network.
    """
    from paceline.report.files import whole
    from paceline.report.page import page
    from paceline.report.summary import figures, markdown

    runs = read_runs(run_dirs)
    if kind == "html":
        path = Path(out) if out else runs[0].folder / "report.html"
        with whole(path) as file:
            file.write(page(runs))
        for run in runs:
            for sentence in figures(run)["words"]:
                click.echo(sentence)
        say(f"report in {path}; open it with a browser")
        return
    found = [figures(run) for run in runs]
    text = "\n".join(map(markdown, found)) if kind == "md" else json.dumps(found, indent=1) + "\n"
    if out:
        with whole(Path(out)) as file:
            file.write(text)
        say(f"report in {out}")
    else:
        click.echo(text, nl=False)
