"""The examples run, stay short, and the README shows what is there."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.docs import DOCUMENTS, RECORDS, filled
from paceline.bench.record import read
from paceline.bench.suite import shipped
from paceline.bench.table import tables

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(*arguments, cwd, timeout=110):
    command = [sys.executable, "-m", "paceline.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) < 120


def alone(*command, cwd):
    """A script as it is, a world of one."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, cwd=cwd, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_images_learns_and_resumes(tmp_path):
    out = alone(EXAMPLES / "images.py", "--epochs", "2", "--checkpoint", "c.ckpt", cwd=tmp_path)
    assert re.findall(r"epoch (\d)", out) == ["0", "1"]
    out = run("run", "--nproc", 2, EXAMPLES / "images.py", "--epochs", 4, "--checkpoint", "c.ckpt", cwd=tmp_path)
    assert re.findall(r"epoch (\d)", out) == ["2", "3"]
    assert float(re.findall(r"accuracy ([\d.]+)", out)[-1]) > 0.8


def test_gpt_learns(tmp_path):
    out = run("run", "--nproc", 2, EXAMPLES / "gpt.py", "--steps", 60, "--batch-size", 32, cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < 3.5  # knowing nothing about 100 letters is ln(100) = 4.6


def test_after_gives_on_three_workers_what_it_gives_on_one(tmp_path):
    subprocess.run([sys.executable, EXAMPLES / "before.py"], check=True, timeout=60, cwd=tmp_path)
    plain = torch.load(tmp_path / "model.pt", weights_only=True)
    models = []
    for start in (partial(alone, EXAMPLES / "after.py"), partial(run, "run", "--nproc", 3, EXAMPLES / "after.py")):
        start(cwd=tmp_path)
        models.append(torch.load(tmp_path / "model.pt", weights_only=True))
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-5)
        assert plain[name].shape == value.shape


def test_readme_shows_the_diff_and_its_example_runs(tmp_path):
    readme = (ROOT / "README.md").read_text()
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("before.py", "after.py"))
    diff = [
        line
        for line in difflib.unified_diff(before[2:], after[2:], lineterm="", n=0)
        if line[:1] in "+-" and not line.startswith(("+++", "---")) and line.strip("+-")
    ]
    (shown,) = re.findall(r"```diff\n(.*?)```", readme, re.DOTALL)
    shown_lines = [line for line in shown.splitlines() if line[:1] in "+-" and line.strip("+-")]
    assert shown_lines == diff
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    (tmp_path / "readme.py").write_text(example)
    assert len(example.splitlines()) <= 22
    run("run", "--nproc", 2, "readme.py", cwd=tmp_path)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_figures_in_the_documents_are_the_records(name):
    """`python -m benchmarks.docs` makes them; a number typed by hand, or a record that changed, fails here."""
    text = (ROOT / name).read_text()
    assert "<!-- record " in text
    assert filled(text) == text
    assert filled(text.replace("| ddp | ", "| ddp | 1")) == text


def test_every_record_is_whole():
    for folder in sorted(RECORDS.iterdir()):
        if (folder / "record.json").exists():
            record = read(folder)
            assert (folder / "table.md").read_text() == tables(record)
            assert (folder / "raw.tar.gz").stat().st_size > 0
            assert record["suite"]["name"] in shipped()
