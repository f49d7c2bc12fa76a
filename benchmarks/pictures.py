"""Pictures for the documents, from shipped records: python -m benchmarks.pictures. Needs Chromium."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path

from paceline.report.page import page
from paceline.report.run import Run

RECORD = Path(__file__).parent / "records" / "2026-11-batch-gpt" / "raw.tar.gz"
PLACE = "gpt-text@fixed-plus-slope/goodput:most=2048+affine+sqrt/seed-1"
NAME = "gpt-on-four-unlike-workers"
OUT = Path(__file__).parent.parent / "docs" / "report.png"


def main() -> None:
    """The top of a report."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(RECORD) as archive:
            wanted = [one for one in archive if one.name.startswith(f"{PLACE}/events/")]
            archive.extractall(folder, wanted, filter="data")
        (Path(folder) / PLACE).rename(Path(folder) / NAME)
        run = Run(Path(folder) / NAME)
        run.update()
        report = Path(folder) / "report.html"
        report.write_text(page([run]))
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            shown = browser.new_page(viewport={"width": 1000, "height": 1180})
            shown.goto(report.as_uri())
            shown.wait_for_selector("[data-chart=split] .main-svg")
            shown.screenshot(path=OUT)
            browser.close()
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
