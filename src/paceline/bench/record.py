"""Records: a dated folder with everything a run of a suite gave, from which tables, plots and docs are made.

2026-11-unlike/
├── record.json     suite as resolved, machine, versions, every run with its step times
├── table.md        made from record.json
├── CASE.png        made from record.json
└── raw.tar.gz      marks, events and lab records of every run
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.events import events_path, parts
from paceline.lab.probe import machine
from paceline.lab.start import lab_dir
from paceline.report.lab import read_lab

SCHEMA = 1
_KEPT = (".jsonl", "spec.json", "cluster.json", "links.json")
_KEPT_BEGINNING = "solo-"


def figures(folder: Path, target: float, warm_up: int, higher_is_better: bool) -> dict[str, Any]:
    """What one run gave, from worker 0's marks and the lab's record."""
    marks = [json.loads(line) for line in (folder / "marks.jsonl").read_text().splitlines()]
    ends = [float(mark["train_s"]) for mark in marks if "score" not in mark]
    tests = [(int(m["step"]), float(m["train_s"]), float(m["score"])) for m in marks if "score" in m]
    steps = [after - before for before, after in pairwise(ends)]
    steps_counted = steps[warm_up:]
    if not steps_counted:
        raise ConfigError(f"a run must make more than {warm_up + 1} steps to be measured, got {len(ends)}")
    reached = [at for _, at, score in tests if (score >= target if higher_is_better else score <= target)]
    lab = read_lab(lab_dir(folder))
    used = [int(mark["samples"]) for mark in marks if "score" not in mark]
    found: dict[str, Any] = {
        "step_s": steps,
        "tests": tests,
        "median_step_s": statistics.median(steps_counted),
        "samples_per_s": (used[-1] - used[warm_up]) / sum(steps_counted),
        "steps": len(ends),
        "mean_batch": used[-1] / len(ends),
        "rounds": _rounds(folder),
        "time_to_target_s": reached[0] if reached else None,
        "final_score": tests[-1][2] if tests else None,
        "final_loss": next((m["loss"] for m in reversed(marks) if "loss" in m), None),
        "split": lab.split[-1] if lab.split else [],
        "plans": sum(a != b for a, b in pairwise(lab.split)),
        "overrun": lab.overrun,
    }
    links = lab_dir(folder) / "links.json"
    if links.is_file():
        found["link_bytes"] = max(json.loads(links.read_text())["up"]) / len(ends)
    if lab.ideal_s:
        ideal = lab.ideal_s[warm_up + 1 : len(steps) + 1]
        found["share_of_optimum"] = sum(ideal) / sum(steps_counted[: len(ideal)])
    return found


def _rounds(folder: Path) -> int | None:
    """Exchanges of a local method; None for others."""
    files = [file for _, file in parts(events_path(folder, 0))]
    return sum('"type": "round"' in line for file in files for line in file.open()) or None


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {}
    for name in ("paceline", "torch", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def gpu() -> str | None:
    """The GPU's name, without starting CUDA in this process."""
    from paceline.lab import mps

    return mps.gpu_name()


class Record:
    """A record being made; record.json is written anew after every run, so that nothing is lost.

    Args:
        folder: where; must exist.
        suite: as resolved.
        cases: workload, cluster and target of each.
        started: when.
    """

    def __init__(self, folder: Path, suite: dict[str, Any], cases: list[dict[str, Any]], started: str) -> None:
        self.folder = folder
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "started": started,
            "suite": suite,
            "machine": {**machine(), "gpu": gpu()},
            "versions": versions(),
            "cases": cases,
            "runs": [],
        }

    def add(self, run: dict[str, Any]) -> None:
        """A run has ended."""
        self.content["runs"].append(run)
        half = self.folder / "record.json.part"
        half.write_text(json.dumps(self.content))
        half.replace(self.folder / "record.json")
        if run["status"] not in ("ok", "not installed"):
            name = f"{run['contender']}-{run['workload']}-{run['cluster']}-{run['seed']}.txt"
            (self.folder / "failed").mkdir(exist_ok=True)
            (self.folder / "failed" / name).write_text(run.get("reason", ""))

    def finish(self, raw: Path) -> None:
        """Add the raw files, table and plots."""
        with tarfile.open(self.folder / "raw.tar.gz", "w:gz") as archive:
            for path in sorted(raw.rglob("*")):
                kept = path.name.endswith(_KEPT) or path.name.startswith(_KEPT_BEGINNING)
                if kept and path.is_file():
                    archive.add(path, path.relative_to(raw))
        render(self.content, self.folder)


def render(record: dict[str, Any], folder: Path) -> bool:
    """Make the table and, where matplotlib is installed, the plots; whether there are plots."""
    from importlib.util import find_spec

    from paceline.bench.table import tables

    (folder / "table.md").write_text(tables(record))
    if find_spec("matplotlib") is None:
        return False
    from paceline.bench.plot import draw

    draw(record, folder)
    return True


def read(folder: Path) -> dict[str, Any]:
    """The record in a folder."""
    path = folder / "record.json"
    if not path.is_file():
        raise ConfigError(f"{folder} must be the folder of a record: there is no {path}")
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} must be the record of a bench, but it is not whole: {error}") from None
    if record.get("schema", 0) > SCHEMA:
        raise ConfigError(f"{path} has schema {record['schema']}, this paceline reads up to {SCHEMA}: use a newer one")
    return record
