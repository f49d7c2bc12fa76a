"""Puts figures from records into the documents, so that nobody types a number: python -m benchmarks.docs [--check]

A document says where a record goes, and this fills what stands between:

    <!-- record 2026-11-unlike headline -->
    <!-- end -->

Forms: `headline`, one short table per case; `tables`, everything of table.md below its title; `steps`, the in-process
record's table.md as it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from paceline.bench.record import read
from paceline.bench.table import case_table, headline, preamble

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
DOCUMENTS = ("README.md", "docs/benchmarks.md")
BLOCK = re.compile(r"(<!-- record ([\w.-]+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A document with every block made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2], found[3])}\n{found[4]}", text)


def block(name: str, form: str) -> str:
    """What stands in a block."""
    folder = RECORDS / name
    if form == "steps":
        lines = (folder / "table.md").read_text().strip().splitlines()
        return "\n".join(line for line in lines if not line.startswith("Machine:")).strip()
    record: dict[str, Any] = read(folder)
    if form == "headline":
        return "\n\n".join("\n".join(headline(record, case)) for case in record["cases"])
    assert form == "tables", f"{form} is no form: headline, tables or steps"
    parts = [preamble(record), *("\n".join(case_table(record, case)) for case in record["cases"])]
    return "\n\n".join(parts).replace("\n## ", "\n### ")


def main() -> None:
    """Fill all documents; with --check only say which would change."""
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        if filled(text) != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(filled(text))
    print(f"{'stale' if '--check' in sys.argv else 'changed'}: {', '.join(stale) or 'nothing'}")
    sys.exit(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    main()
