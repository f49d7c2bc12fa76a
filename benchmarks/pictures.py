"""Pictures for the documents, from shipped records: python -m benchmarks.pictures. Needs matplotlib and Chromium."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path

from paceline.report.contest import draw, read_entry
from paceline.report.page import page
from paceline.report.run import Run

RECORDS = Path(__file__).parent / "records"
DOCS = Path(__file__).parent.parent / "docs"
NAMES = {"ddp": "plain DDP", "hand-tuned": "hand-tuned DDP", "dbs": "DBS", "affine": "paceline"}


def unpacked(record: str, place: str, folder: Path) -> Path:
    """A part of a record's raw files."""
    with tarfile.open(RECORDS / record / "raw.tar.gz") as archive:
        wanted = [one for one in archive if one.name.startswith(f"{place}/")]
        archive.extractall(folder, wanted, filter="data")
    return folder / place


def slowed(folder: Path) -> Path:
    """Step time and split over steps, when a worker slows down."""
    place = unpacked("2026-11-slowed", "cnn-digits@slowed-midway", folder)
    entries = [read_entry(name, place / contender / "seed-1") for contender, name in NAMES.items()]
    draw(entries, NAMES["affine"], DOCS / "slowed.png")
    return DOCS / "slowed.png"


def report(folder: Path) -> Path:
    """The top of a report."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    place = "gpt-text@fixed-plus-slope/goodput:most=2048+affine+sqrt/seed-1"
    run = Run(unpacked("2026-11-batch-gpt", place, folder), name="gpt-on-four-unlike-workers")
    run.update()
    file = folder / "report.html"
    file.write_text(page([run]))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": 1000, "height": 1180})
        shown.goto(file.as_uri())
        shown.wait_for_selector("[data-chart=split] .main-svg")
        shown.screenshot(path=DOCS / "report.png")
        browser.close()
    return DOCS / "report.png"


def main() -> None:
    """Draw all."""
    for picture in (slowed, report):
        with tempfile.TemporaryDirectory() as folder:
            print(f"wrote {picture(Path(folder))}")


if __name__ == "__main__":
    main()
