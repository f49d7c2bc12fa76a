"""One HTML file that holds everything: opened from disk, on a machine without a network, years later."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from paceline.errors import ConfigError
from paceline.report.charts import charts
from paceline.report.run import Run
from paceline.report.summary import figures


def of_run(run: Run) -> dict[str, Any]:
    """All that a page shows of a run, as plain values."""
    found = figures(run)
    return {
        "id": str(run.folder.resolve()),
        "name": run.name,
        "figures": found,
        "charts": charts(run, found),
        "num_decisions": run.num_decisions,
        "decisions": [
            {"t": said.t, "step": said.step, "kind": said.kind, "worker": said.worker, "text": said.text}
            for said in reversed(run.decisions)
        ],
    }


def safe_json(value: Any) -> str:
    """JSON that can stand within a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def plotly() -> str:
    """The drawing library's script, as it comes with its package.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("plotly") is None:
        raise ConfigError("pages are drawn by Plotly: pip install 'paceline[view]', or use --format md")
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def static(name: str) -> str:
    """A file of the page."""
    return (files("paceline.report") / "static" / name).read_text(encoding="utf-8")


def page(runs: list[Run]) -> str:
    """The report of these runs as one HTML file."""
    told = [of_run(run) for run in runs]
    title = html.escape(", ".join(one["name"] for one in told))
    words = "".join(f"<p>{html.escape(text)}</p>" for one in told for text in one["figures"]["words"])
    library = plotly().replace("</script", "<\\/script")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title} - paceline</title>
<style>{static("page.css")}</style>
</head>
<body>
<a class="skip" href="#runs">to the runs</a>
<header><h1>paceline report</h1></header>
<main><noscript>{words}</noscript><div id="tools"></div><div class="runs" id="runs"></div></main>
<script>{library}</script>
<script>{static("page.js")}
document.getElementById("tools").append(tools());
for (const run of {safe_json(told)}) show(run, document.getElementById("runs"));
</script>
</body>
</html>
"""
