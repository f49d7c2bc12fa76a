"""Reports of runs: what is said is what the events say, whatever state they are in."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import paceline
from paceline.cli import main
from paceline.config import Settings
from paceline.errors import ConfigError
from paceline.events import SCHEMA, EventLog, events_path, parts, read
from paceline.policies.balance.window import observe
from paceline.report.charts import charts
from paceline.report.follow import Follower, newest, workers
from paceline.report.live import frame, recent
from paceline.report.page import of_run, page, safe_json
from paceline.report.run import Run
from paceline.report.series import Series
from paceline.report.steps import places, spans
from paceline.report.summary import figures, markdown
from paceline.report.trace import entries, first_step, write
from paceline.runtime.lookout import told_of
from paceline.runtime.track import scalars, sinks
from paceline.types import Limits
from tests import ranks
from tests.nets import mlp, points
from tests.runs import simulate, start, steps, window, write_run


def told(folder):
    run = Run(folder)
    run.update()
    return run


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(-1e3, 1e3) | st.none()), min_size=1, max_size=300),
    st.sampled_from([2, 8, 64]),
)
def test_a_series_keeps_its_mean_in_bounded_memory(rows, most):
    series = Series(2, most)
    for step, value in rows:
        series.add(step, (value, 1.0))
    assert len(series) <= most
    there = [value for _, value in rows if value is not None]
    mean, ones = series.mean()
    assert ones == 1
    assert mean is None if not there else mean == pytest.approx(np.mean(there), abs=1e-6)
    assert series.steps == sorted({step // series.width * series.width for step, _ in rows})
    assert max(step for step, _ in rows) < most * series.width


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_a_file_that_grows_is_read_as_if_it_were_whole(tmp_path_factory, cuts):
    path = tmp_path_factory.mktemp("grows") / "worker-0000.jsonl"
    lines = [json.dumps({"type": "note", "t": number, "text": "ä" * (number % 7)}) for number in range(40)]
    data = ("\n".join(lines) + "\n").encode()
    follower, found, done = Follower(path), [], 0
    with path.open("ab") as file:
        for cut in [*cuts, len(data)]:
            file.write(data[done : done + cut])
            file.flush()
            done += cut
            found += follower.new()
    assert [event["t"] for event in found] == list(range(40))
    assert follower.damaged == 0


def test_a_file_is_followed_into_its_next_ones(tmp_path):
    path = tmp_path / "worker-0000.jsonl"
    for part, first in ((path, 0), (tmp_path / "worker-0000.1.jsonl", 2), (tmp_path / "worker-0000.4.jsonl", 4)):
        part.write_text("".join(json.dumps({"type": "note", "t": n, "text": ""}) + "\n" for n in (first, first + 1)))
    follower = Follower(path)
    assert [event["t"] for event in follower.new()] == list(range(6))
    assert list(follower.new()) == []


def test_the_figures_are_the_events(tmp_path):
    """Four workers with equal shares, the last four times as slow: who waits, for whom, and what would help."""
    busy = [0.1, 0.05, 0.05, 0.2]
    run = told(write_run(tmp_path, [32] * 4, busy))
    found = figures(run)
    assert found["status"] == "ended"
    assert found["samples_per_s"] == pytest.approx(128 / 0.21)
    assert found["limit_samples_per_s"] == pytest.approx(sum(32 / t for t in busy))
    assert found["step_s"] == pytest.approx(0.21)
    for one, took in zip(found["workers"], busy, strict=True):
        assert one["samples"] == 32
        assert one["samples_per_s"] == pytest.approx(32 / took)
        assert one["waiting_s"] == pytest.approx(0.2 - took)
        assert one["exchange_s"] == pytest.approx(0.01)
        assert one["compute_s"] == pytest.approx(took - 0.003)
        assert one["idle_share"] == pytest.approx((0.2 - took) / 0.21)
    assert found["losses"] == [{"epoch": 0, "step": 40, "loss": pytest.approx(0.5)}]
    assert "waits 71% of it, mostly for worker 3" in found["words"][2]
    best = 128 / sum(32 / t for t in busy) + 0.01
    assert f"balance='affine' would save about {1 - best / 0.21:.0%}" in found["advice"][0]
    assert "| 3 (here, cpu) | 32.0 | 160 | 2.0 ms | 197.0 ms | 0.0 ms | 10.0 ms | 1.0 ms |" in markdown(found)


def test_advice_about_exchange_and_data(tmp_path):
    slow_link = figures(told(write_run(tmp_path / "a", [32, 32], [0.1, 0.1], exchange=0.1)))
    assert "the exchange takes 50% of each step: sync='overlap'" in slow_link["advice"][0]
    fine = figures(told(write_run(tmp_path / "b", [32, 32], [0.1, 0.1], exchange=0.001)))
    assert fine["advice"] == []
    assert "nobody waits more than 0%" in fine["words"][2]


def test_runs_in_every_state(tmp_path):
    (tmp_path / "empty").mkdir()
    empty = told(tmp_path / "empty")
    assert empty.status() == "empty"
    assert "Nothing has been written" in figures(empty)["words"][0]
    assert "nothing written yet" in str(frame(empty, 80))

    going = told(write_run(tmp_path / "going", [8, 8], [0.1, 0.1], ends=False))
    assert going.status(now=going.written + 1) == "running"
    assert going.status(now=going.written + 600) == "silent"

    torn = write_run(tmp_path / "torn", [8, 8], [0.1, 0.1])
    path = events_path(torn, 1)
    text = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join([*text[:4], "{not json\n", "[]\n", '{"type": "steps", "t": 1}\n', *text[4:-1], text[-1][:20]])
    )
    run = told(torn)
    assert run.damaged == 3
    assert run.workers[1].ok is None  # its end is torn
    assert figures(run)["samples_per_s"] == pytest.approx(16 / 0.11)
    assert "3 damaged lines" in figures(run)["words"][-1]

    lost = told(write_run(tmp_path / "lost", [8, 24, 8], [0.1, 0.3, 0.1], leave_out=[0, 2]))
    assert lost.missing == [0, 2]
    found = figures(lost)
    assert found["num_workers"] == 3
    assert [one["samples"] for one in found["workers"]] == [8, 24, 8]  # what the one that is left had heard
    assert found["workers"][0]["waiting_s"] == pytest.approx(0.2)
    assert "No events of workers 0, 2" in " ".join(found["words"])
    assert [row["samples"] for row in recent(lost)] == [8, 24, 8]

    newer = write_run(tmp_path / "newer", [8], [0.1])
    path = events_path(newer, 0)
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}'))
    with pytest.raises(ConfigError, match="update paceline"):
        told(newer)

    with pytest.raises(ConfigError, match="there is no"):
        workers(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no run in"):
        newest(tmp_path / "nowhere")
    assert newest(tmp_path).name in {"going", "torn", "lost", "newer"}


def test_a_run_that_goes_on_is_read_on(tmp_path):
    whole = write_run(tmp_path / "whole" / "run", [8, 8], [0.1, 0.2])
    run = Run(tmp_path / "part" / "run")
    for rank in (0, 1):
        events_path(run.folder, rank).parent.mkdir(parents=True, exist_ok=True)
    files = {rank: events_path(whole, rank).read_text().splitlines(keepends=True) for rank in (0, 1)}
    for upto in range(1, max(map(len, files.values())) + 1):
        for rank, lines in files.items():
            with events_path(run.folder, rank).open("a") as file:
                file.writelines(lines[upto - 1 : upto])
        run.update(budget_s=0.0)  # never enough: it goes on where it stopped
    while run.read_share < 1 or run.update():
        run.update(budget_s=0.0)
    assert figures(run) == figures(told(whole))


def test_clocks_that_differ_are_set_right(tmp_path):
    run = told(write_run(tmp_path, [8, 8, 8], [0.1, 0.2, 0.15], clocks=[0.0, 180.0, -60.0]))
    assert run.seconds == pytest.approx(40 * 0.21)
    offsets = run.offsets()
    assert offsets == {0: 0.0, 1: pytest.approx(180, abs=1e-6), 2: pytest.approx(-60, abs=1e-6)}
    ends = {}
    for entry in entries(run):
        if entry["ph"] == "X" and entry["name"] == "exchange and waiting":
            ends.setdefault(entry["args"]["step"], []).append(entry["ts"] + entry["dur"])
    assert len(ends) == 40
    assert all(max(times) - min(times) < 5 for times in ends.values())  # microseconds: sums arrive together


def test_a_trace_is_json_that_tells_every_step(tmp_path):
    run = told(write_run(tmp_path / "run", [8, 8], [0.1, 0.2]))
    count = write(run, tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(found) == count
    spans = [entry for entry in found if entry["ph"] == "X"]
    assert {(entry["pid"], entry["args"]["step"]) for entry in spans} == {(w, s) for w in (0, 1) for s in range(40)}
    assert sum(entry["dur"] for entry in spans if entry["name"] == "compute" and entry["pid"] == 1) == pytest.approx(
        40 * 0.197e6
    )
    assert any(entry["ph"] == "i" and "first plan" in entry["args"]["why"] for entry in found)
    assert any(entry["ph"] == "M" and entry["args"].get("name") == "worker 1 (here, cpu)" for entry in found)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write(run, tmp_path / "folder")
    assert not list(tmp_path.glob("*.part"))


def test_markup_in_names_and_reasons_stays_text(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = told(write_run(tmp_path / "<b>run", [8, 8], [0.1, 0.2], name=evil))
    text = page([run])
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "<b>run" not in text
    inner = safe_json({"a": evil})
    assert "<" not in inner
    assert json.loads(inner) == {"a": evil}


def test_charts_hold_the_numbers_of_the_events(tmp_path):
    run = told(write_run(tmp_path, [8, 24], [0.1, 0.3], num_steps=400))
    by_id = {chart["id"]: chart for chart in charts(run, figures(run))}
    assert by_id["split"]["lines"][1]["y"] == [24.0] * 100
    assert by_id["speed"]["lines"][0]["y"][-1] == pytest.approx(32 / 0.31)
    assert by_id["lanes"]["z"][0] == pytest.approx([100 * 0.2 / 0.31] * 100)
    assert "Worker 0 waits most: 65%" in by_id["lanes"]["text"]
    assert json.loads(json.dumps(of_run(run)))["figures"]["steps"] == 400


def test_the_screen_fits_narrow_and_many(tmp_path):
    run = told(write_run(tmp_path, [8] * 30, [0.1 + 0.01 * n for n in range(30)], num_steps=8))
    for width, height in ((40, 20), (200, 60)):
        console = Console(width=width, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(frame(run, width, height))
        lines = capture.get().splitlines()
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert "\x1b" not in capture.get()
    assert "workers more" not in capture.get()


def train(folder, **more):
    with paceline.init(timeout_s=30, run_dir=folder, batch="schedule:0=24,96=48", replan_every=2, **more) as pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(192), 24)
        for _ in range(2):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return loader.step


def test_a_real_run_in_every_form(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first"
    count = ranks.run(2, train, folder, timeout_s=60)[0]
    found = figures(told(folder))
    assert found["status"] == "ended"
    assert found["dropped_events"] == found["damaged_lines"] == 0
    samples = [sum(e["samples"]) for rank in (0, 1) for e in read(events_path(folder, rank)) if e["type"] == "steps"]
    assert sum(samples) >= 2 * 192 - 4 * 48  # all but the first step and the last window
    assert count - 4 <= found["steps"] <= count
    for step in (e for e in read(events_path(folder, 0)) if e["type"] == "steps"):
        assert all(later > earlier for earlier, later in zip(step["at"], step["at"][1:], strict=False))

    main(["watch", "--once"])
    assert "first · ended" in capsys.readouterr().out
    main(["report"])
    assert "first has ended: 2 workers" in capsys.readouterr().out
    assert "</html>" in (folder / "report.html").read_text()
    main(["report", str(folder), "--format", "json"])
    assert json.loads(capsys.readouterr().out)[0]["num_workers"] == 2
    main(["report", str(folder), str(folder), "--format", "md", "-o", str(tmp_path / "r.md")])
    assert (tmp_path / "r.md").read_text().count("# first") == 2
    main(["trace"])
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    for command in (["report", "nowhere"], ["watch", "nowhere"], ["trace", "nowhere"]):
        with pytest.raises(SystemExit):
            main(command)
        assert "there is no nowhere" in capsys.readouterr().err


def followed(folder):
    """Scalars in a TensorBoard folder: name -> [(step, value)]."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def tracked(folder, board):
    return train(folder, tensorboard=board)


def test_scalars_for_tensorboard_live_and_afterwards(tmp_path):
    folder, live, later = tmp_path / "run", tmp_path / "live", tmp_path / "later"
    ranks.run(2, tracked, folder, live, timeout_s=60)
    main(["trace", str(folder), "--tensorboard", str(later)])
    told_live, told_later = followed(live), followed(later)
    windows = [event for event in read(events_path(folder, 0)) if event["type"] == "window"]
    assert told_live["speed/samples_per_s"] == [
        (event["step"], pytest.approx(event["samples_per_s"], rel=1e-6)) for event in windows
    ]
    assert told_live.keys() == told_later.keys()
    assert told_live["worker-1/samples"] == told_later["worker-1/samples"]
    assert told_live["batch/samples"][0][1] == 48
    with pytest.raises(SystemExit):
        main(["trace", str(folder), "--tensorboard", "a", "-o", "b"])


def test_trackers_that_nobody_knows_or_has(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        Settings(track="wandbb")
    for name in ("wandb", "mlflow"):
        if find_spec(name) is None:
            with pytest.raises(ConfigError, match=f"pip install {name}"):
                sinks(None, name, {})


def with_mlflow(folder, address):
    library = pytest.importorskip("mlflow")
    library.set_tracking_uri(address)
    train(folder, track="mlflow")


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed: pip install mlflow")
def test_mlflow_is_told(tmp_path):
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    ranks.run(2, with_mlflow, tmp_path / "run", address, timeout_s=120)
    library = pytest.importorskip("mlflow")
    library.set_tracking_uri(address)
    client = library.MlflowClient()
    (run,) = client.search_runs(["0"])
    kept = client.get_metric_history(run.info.run_id, "paceline/speed/samples_per_s")
    windows = [event for event in read(events_path(tmp_path / "run", 0)) if event["type"] == "window"]
    assert [(one.step, one.value) for one in kept] == [(one["step"], one["samples_per_s"]) for one in windows]


def with_wandb(folder, own):
    library = pytest.importorskip("wandb")
    main_one = int(os.environ["RANK"]) == 0
    if own and main_one:
        library.init()
    train(folder, track="wandb")
    if own and main_one:
        library.log(
            {"mine": 1.0}, step=2, commit=True
        )  # an epoch, say: its steps go on as if nobody else had told anything
    return dict(library.run.summary) if main_one else {}


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed: pip install wandb")
@pytest.mark.parametrize("own", [False, True])
def test_wandb_is_told(tmp_path, own):
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    kept = ranks.run(2, with_wandb, tmp_path / "run", own, timeout_s=120, env=env)[0]
    events = list(read(events_path(tmp_path / "run", 0)))
    rows = sum(1 for event in events if event["type"] == "end" or any(scalars(event)))
    windows = [event for event in events if event["type"] == "window"]
    assert kept["paceline/speed/samples_per_s"] == windows[-1]["samples_per_s"]
    assert kept["_step"] == (2 if own else rows - 1)  # the number of the last row
    assert kept.get("mine") == (1.0 if own else None)


def test_memory_is_bounded(tmp_path):
    """A run of thirty thousand steps is read in the memory of one of a thousand, give or take the buckets."""
    code = (
        "import resource, sys; from pathlib import Path; from paceline.report.run import Run; from paceline.report.summary import figures\n"
        "run = Run(Path(sys.argv[1])); run.update(); figures(run)\n"
        "print(run.last_step, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = {}
    for count in (1000, 30_000):
        folder = write_run(tmp_path / str(count), [8, 8], [0.1, 0.2], num_steps=count, every=20)
        out = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=100
        )
        last, peaks[count] = map(int, out.stdout.split())
        assert last == count - 1
    assert peaks[30_000] < peaks[1000] + 12_000  # kilobytes; the files have 15 MB


def test_a_run_that_goes_on_after_a_crash_on_fewer_workers(tmp_path):
    first = write_run(tmp_path, [8, 8, 8, 8], [0.1, 0.1, 0.1, 0.1], num_steps=20, ends=False)
    with events_path(first, 0).open("a") as file:
        file.write('{"type": "win')  # torn
    write_run(first, [8, 24], [0.1, 0.3], num_steps=400)
    run = told(first)
    found = figures(run)
    assert found["status"] == "ended"
    assert found["num_workers"] == 2
    assert run.damaged == 1
    assert [worker.starts for worker in run.workers.values()] == [2, 2, 1, 1]
    assert found["workers"][0]["waiting_s"] == pytest.approx(0.2)
    assert found["seconds"] == pytest.approx(20 * 0.11 + 400 * 0.31)
    assert found["missing"] == []
    assert json.dumps(of_run(run))


def test_files_in_parts_are_one_run(tmp_path):
    """Workers whose logs have come to unlike parts: what all say is taken once, and no part is a new start."""
    for rank, most in ((0, 80_000), (1, 150_000)):
        log = EventLog(events_path(tmp_path, rank), clock=lambda: 5.0, most_bytes=most)
        log.write("start", **start(rank, 2, sync="local:h=2"))
        for step in range(150):
            log.write("steps", **steps(step, 1, 8, 0.001, 0.1, 0.0, 0.001, 1000.0 + step))
            log.write("round", step=step, num_bytes=10, transfer_s=0.1, waited_s=0.0, drift=0.5)
            log.flush()
        log.write("end", step=150, ok=True, dropped=0)
        log.close()
    assert len(parts(events_path(tmp_path, 0))) > len(parts(events_path(tmp_path, 1))) > 1
    run = told(tmp_path)
    assert run.status() == "ended"
    assert [worker.starts for worker in run.workers.values()] == [1, 1]
    assert run.num_rounds == 150
    assert run.round_bytes == 3000  # what each has sent


def test_a_closer_look_begins_where_the_step_is(tmp_path):
    run = told(write_run(tmp_path, [8, 8], [0.1, 0.2], num_steps=20_000, every=20))
    assert all(len(worker.follower.index) >= 2 for worker in run.workers.values())
    look = places(run, 15_003, 15_007)
    assert all(offset > 2**20 for _, offset in look.begins.values())
    chart = spans(look, 15_003, 15_007)
    for line in chart["lines"]:
        assert line["steps"] == [15_003, 15_004, 15_005, 15_006, 15_007] * 2
    assert chart["lines"][1]["x"] == pytest.approx([97.0] * 5 + [197.0] * 5)
    assert spans(places(run, 0, 19_999), 0, 19_999) is None


def test_nothing_in_a_file_is_trusted(tmp_path):
    run_dir = write_run(tmp_path / "run\x1b[2J", [8, 8], [0.1, 0.2])
    with events_path(run_dir, 0).open("a") as file:
        for line in (
            '{"type": "start", "t": 1, "schema": 1, "rank": 0, "size": 1000000000}',
            '{"type": "start", "schema": 1}',
            '{"type": "steps", "t": 1, "step": [1e999], "samples": [1], "data_wait_s": [1], "compute_s": [1], "comm_s": [1], "optimizer_s": [1]}',
            '{"type": "steps", "t": 1, "step": [1], "samples": ["x"], "data_wait_s": [1], "compute_s": [1], "comm_s": [1], "optimizer_s": [1]}',
            '{"type": "plan", "t": 1, "step": 99999999999999, "split": [1, 2], "changed": true, "reason": "x"}',
            '{"type": "note", "t": 1, "text": "\\u001b]0;mine\\u0007 \\n two lines"}',
        ):
            file.write(line + "\n")
    (run_dir / "events" / "worker-99999999.jsonl").write_text("")
    run = told(run_dir)
    assert run.size == 2
    assert run.damaged == 5
    assert figures(run)["samples_per_s"] == pytest.approx(16 / 0.21)
    text = json.dumps(of_run(run), ensure_ascii=False) + run.name + run.decisions[-1].text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\n" not in run.decisions[-1].text


def test_a_screen_reads_the_newest_of_a_long_run_and_every_decision(tmp_path):
    run_dir = write_run(tmp_path / "long", [8, 24], [0.1, 0.2], num_steps=12_000, ends=False)
    for rank in range(2):
        log = EventLog(events_path(run_dir, rank))
        log.write("batch", step=12_000, start=12_001, total=64, before=32, reason="noise", noise=80.0)
        log.write("end", step=12_000, ok=True, dropped=0)
        log.close()
    whole, short = Run(run_dir), Run(run_dir, newest=2**20)
    for run in (whole, short):
        run.update()
    assert sum(file.stat().st_size for file in (run_dir / "events").iterdir()) > 3 * 2**20
    assert len(short.workers[0].steps) < len(whole.workers[0].steps) / 2
    for name in ("decisions", "losses", "split", "last_step", "window", "damaged", "seconds", "size", "config"):
        assert getattr(short, name) == getattr(whole, name), name
    assert short.status() == whole.status() == "ended"
    assert [short.workers[rank].recent for rank in range(2)] == [whole.workers[rank].recent for rank in range(2)]
    assert short.offsets() == whole.offsets()
    assert recent(short) == recent(whole)


@given(budgets=st.lists(st.sampled_from([0.0, 1e-4, 10.0]), max_size=8), newest=st.sampled_from([None, 2**16]))
@settings(max_examples=20, deadline=None)
def test_a_run_read_in_pieces_is_the_run(tmp_path_factory, budgets, newest):
    run_dir = tmp_path_factory.getbasetemp() / "in-pieces"
    if not run_dir.exists():
        write_run(run_dir, [8, 24, 8], [0.1, 0.2, 0.3], num_steps=3000)
    whole, pieces = Run(run_dir, newest), Run(run_dir, newest)
    whole.update()
    for budget in budgets:
        pieces.update(budget)
    while pieces.update(0.0):
        pass
    assert pieces.read_share == 1.0
    assert figures(pieces) == figures(whole)
    assert [one.steps.means(2) for one in pieces.workers.values()] == [
        one.steps.means(2) for one in whole.workers.values()
    ]


def test_advice_comes_true(tmp_path):
    """What a report of equal shares promises of `affine`, and what `affine` took, in a shipped record."""
    record = Path(__file__).parent.parent / "benchmarks" / "records" / "2026-11-unlike" / "raw.tar.gz"
    with tarfile.open(record) as archive:
        wanted = [one for one in archive if re.search(r"/(equal|affine)/seed-1/events/", one.name)]
        archive.extractall(tmp_path, wanted, filter="data")
    place = tmp_path / "cnn-fashion@four-unlike"
    before, after = (figures(told(place / name / "seed-1")) for name in ("equal", "affine"))
    (said,) = before["advice"]
    assert re.fullmatch(r"worker 3 is idle \d+% of each step: balance='affine' would save about (\d+)%", said)
    promised = int(re.findall(r"(\d+)%", said)[-1]) / 100
    assert 1 - after["step_s"] / before["step_s"] == pytest.approx(promised, abs=0.03)
    assert after["advice"] == []


def test_a_simulated_run_is_seen_like_any_other(tmp_path):
    seconds, split = simulate(tmp_path / "sim", fixed=[0.02, 0.02], slope=[0.004, 0.001], total=64)
    run = told(tmp_path / "sim")
    found = figures(run)
    assert found["status"] == "ended"
    assert found["seconds"] == pytest.approx(seconds)
    assert found["split"] == list(split) == [13, 51]  # 0.02 + 0.004 * 12.8 = 0.02 + 0.001 * 51.2
    assert found["advice"] == []
    assert run.windows.means(1)[-1] < run.windows.means(1)[0]  # a step takes less
    first = [one for one in entries(run) if one["ph"] == "X" and one["args"]["step"] == 0]
    assert [one["ts"] for one in first if one["name"] == "compute"] == [0.0, 0.0]
    console = Console(width=90, color_system=None)
    with console.capture() as capture:
        console.print(frame(run, 90))
    assert "gains" in capture.get()
    chart = {one["id"]: one for one in charts(run, found)}["split"]
    assert [line["y"][-1] for line in chart["lines"]] == [13, 51]
    assert run.name in page([run])


def until(descriptor, wanted, seen=b"", timeout_s=60):
    """What a terminal shows up to the moment it shows `wanted`."""
    deadline = time.monotonic() + timeout_s
    while wanted not in seen:
        if time.monotonic() > deadline or not select.select([descriptor], [], [], timeout_s)[0]:
            raise AssertionError(f"no {wanted!r} in {seen[-4000:]!r}")
        seen += os.read(descriptor, 2**16)
    return seen


@pytest.mark.parametrize("ended_by", ["run", "interrupt"])
def test_watch_in_a_terminal(tmp_path, ended_by):
    run_dir = write_run(tmp_path / "run", [8, 8], [0.1, 0.2], ends=False)
    screen, terminal = pty.openpty()
    heard = ["env", "--default-signal=INT"]  # a job in the background passes on that it ignores interrupts
    command = [*heard, sys.executable, "-m", "paceline.cli", "watch", "--every", "0.1", str(run_dir)]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env) as watching:
        os.close(terminal)
        first = until(screen, b"optimizer")
        assert b"running" in first
        assert b"\x1b[?25l" in first  # the cursor is hidden
        logs = [EventLog(events_path(run_dir, rank)) for rank in range(2)]
        for log in logs:
            log.write("steps", **steps(40, 4, 8, 0.002, 0.1, 0.1, 0.001, 1010.0))
            log.flush()
        until(screen, b"step 43")
        if ended_by == "run":
            for log in logs:
                log.write("end", step=44, ok=True, dropped=0)
        else:
            watching.send_signal(signal.SIGINT)
        for log in logs:
            log.close()
        last = until(screen, b"\x1b[?25h")  # and is back
        assert (b"ended" in last) == (ended_by == "run")
        assert b"Traceback" not in last
        assert watching.wait(30) == 0
    os.close(screen)


def test_a_trace_of_some_steps(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run", [8, 8], [0.1, 0.2], num_steps=4000)
    run = told(run_dir)
    whole = [one for one in entries(run) if one["ph"] == "X"]
    chosen = [one for one in entries(run, 1001, 1010) if one["ph"] == "X"]
    assert {one["args"]["step"] for one in whole} == set(range(4000))
    assert chosen == [one for one in whole if 1001 <= one["args"]["step"] <= 1010]
    assert len(chosen) == 10 * 2 * 4
    assert first_step(run, most=800) == 3900
    assert first_step(run) == 0
    assert main(["trace", str(run_dir), "--steps", "3990:5000"]) is None
    told_steps = {
        one["args"]["step"]
        for one in json.loads((run_dir / "trace.json").read_text())["traceEvents"]
        if one["ph"] == "X"
    }
    assert told_steps == set(range(3990, 4000))
    for wrong in ("7", "a:b", "9:3", "-1:4", "4000:4001"):
        with pytest.raises(SystemExit, match="2"):
            main(["trace", str(run_dir), "--steps", wrong])
        assert wrong in capsys.readouterr().err


def attempt(folder, sizes, split, busy, first, count, number, *, ends=True, loss=None, **more):
    """One more attempt of a run: some workers, from a step on."""
    for rank in range(sizes):
        log = EventLog(events_path(folder, rank), clock=lambda: 1000.0 * number, **more)
        log.write("start", **start(rank, sizes, attempt=float(number), pid=10 * number + rank))
        for step in range(first, first + count, 4):
            comm = max(busy) - busy[rank] + 0.01
            at = 1000.0 * number + step * (max(busy) + 0.01)
            log.write("steps", **steps(step, 4, split[rank], 0.0, busy[rank], comm, 0.0, at))
            log.write("window", **window(step + 3, split, busy))
        if loss is not None:
            log.write("loss", epoch=0, step=first + count, loss=loss, samples=10)
        if ends:
            log.write("end", step=first + count, ok=True, dropped=0)
        log.close()


def test_a_run_that_goes_on_with_more_workers_ends(tmp_path):
    attempt(tmp_path, 2, [8, 8], [0.1, 0.2], 0, 40, 1)
    attempt(tmp_path, 4, [4, 4, 4, 4], [0.1, 0.2, 0.3, 0.4], 40, 40, 2)
    run = told(tmp_path)
    assert run.status() == "ended"
    found = figures(run)
    assert found["num_workers"] == 4
    assert found["steps"] == 80
    assert found["split"] == [4, 4, 4, 4]
    assert found["step_s"] == pytest.approx(0.41)
    assert [one["idle_share"] for one in found["workers"]] == pytest.approx([0.3 / 0.41, 0.2 / 0.41, 0.1 / 0.41, 0.0])
    lanes = {one["id"]: one for one in charts(run, found)}["lanes"]
    assert all(value is not None for row in lanes["z"] for value in row)


def test_what_was_done_again_replaces_what_was_lost(tmp_path):
    attempt(tmp_path, 2, [8, 8], [0.1, 0.2], 0, 1000, 1, ends=False, loss=9.0)
    attempt(tmp_path, 2, [4, 12], [0.05, 0.05], 200, 100, 2, loss=1.0)
    run = told(tmp_path)
    found = figures(run)
    assert found["steps"] == 300
    assert found["step_s"] == pytest.approx(0.06)  # not of the steps that were lost
    assert found["samples_per_s"] == pytest.approx(16 / 0.06)
    assert found["losses"] == [{"epoch": 0, "step": 300, "loss": 1.0}]
    assert run.workers[0].steps.steps[-1] == 299
    assert run.workers[0].steps.means(1)[0] == 0.0
    assert run.workers[0].steps.means(2)[0] == pytest.approx(0.1)  # what was not done again stays
    chart = spans(places(run, 196, 203), 196, 203)
    compute = {line["name"]: line for line in chart["lines"]}["compute"]
    assert compute["steps"] == list(range(196, 204)) * 2
    assert compute["x"] == pytest.approx([100.0] * 4 + [50.0] * 4 + [200.0] * 4 + [50.0] * 4)


def test_a_run_that_goes_on_by_a_clock_that_is_behind(tmp_path):
    attempt(tmp_path, 2, [8, 8], [0.1, 0.2], 0, 40, 9, ends=False)
    attempt(tmp_path, 2, [12, 4], [0.1, 0.1], 40, 40, 3)
    run = told(tmp_path)
    assert (run.status(), run.last_step, run.split) == ("ended", 79, [12, 4])


def test_workers_that_join_by_a_clock_that_is_behind(tmp_path):
    attempt(tmp_path, 2, [8, 8], [0.1, 0.2], 0, 40, 9)
    attempt(tmp_path, 3, [4, 4, 8], [0.1, 0.2, 0.2], 40, 40, 3)
    run = told(tmp_path)
    assert (run.status(), run.last_step, run.split) == ("ended", 79, [4, 4, 8])


def test_older_files_that_tell_no_attempt(tmp_path):
    attempt(tmp_path, 2, [8, 8], [0.1, 0.2], 0, 40, 1)
    attempt(tmp_path, 4, [4, 4, 4, 4], [0.1] * 4, 40, 40, 2)
    for rank in range(4):
        path = events_path(tmp_path, rank)
        path.write_text(re.sub(r'"attempt": [0-9.]+, ', "", path.read_text()).replace('"waiting_s"', '"other"'))
    run = told(tmp_path)
    assert (run.status(), run.last_step, run.split) == ("ended", 79, [4, 4, 4, 4])
    assert figures(run)["exchange_s"] == pytest.approx(0.01)


def test_a_resume_keeps_what_was_before_it(tmp_path):
    """A loader writes a plan for step 0 before the checkpoint is read; epochs that were lost are not told of."""
    attempt(tmp_path, 2, [8, 8], [0.1, 0.2], 0, 80, 1, ends=False)
    with EventLog(events_path(tmp_path, 0), clock=lambda: 1500.0) as log:
        for epoch in range(6):
            log.write("loss", epoch=epoch, step=epoch * 10, loss=10.0 + epoch, samples=10)
        log.write("batch", step=40, start=41, total=32, before=16, reason="noise", noise=80.0)
        log.write("round", step=70, span=[0, 9], num_bytes=100, transfer_s=0.1, waited_s=0.0, drift=0.0)
    attempt(tmp_path, 2, [8, 8], [0.1, 0.2], 60, 0, 2, ends=False)
    run = told(tmp_path)
    assert (run.last_step, run.num_rounds) == (79, 1)  # nothing is done again yet
    with EventLog(events_path(tmp_path, 0), clock=lambda: 2500.0) as log:
        log.write("plan", step=0, start=0, split=[8, 8], changed=True, reason="first plan", predicted_s=None, digest=1)
        log.write("steps", **steps(60, 4, 8, 0.0, 0.1, 0.1, 0.0, 2001.0))
        log.write("window", **window(63, [8, 8], [0.1, 0.2]))
        log.write("loss", epoch=3, step=63, loss=1.0, samples=10)
        log.write("round", step=63, span=[0, 9], num_bytes=7, transfer_s=0.1, waited_s=0.0, drift=0.0)
    run.update()
    assert run.last_step == 63
    assert run.batches.steps == [40]
    assert not run.decisions[-1].text.startswith("split")
    assert [one["epoch"] for one in figures(run)["losses"]] == [0, 1, 2, 3]
    assert (run.num_rounds, run.round_bytes) == (1, 7)


def test_a_long_run_that_was_killed_falls_silent(tmp_path):
    run_dir = write_run(tmp_path, [8, 24], [0.1, 0.2], num_steps=12_000, ends=False)
    whole, short = told(run_dir), Run(run_dir, newest=2**19)
    short.update()
    assert short.workers[0].pause_s == pytest.approx(whole.workers[0].pause_s) == pytest.approx(0.84)
    later = whole.written + 100
    assert whole.status(later) == short.status(later) == "silent"


def test_a_new_start_in_a_file_that_is_gone(tmp_path):
    attempt(tmp_path, 3, [8, 8, 8], [0.1, 0.2, 0.2], 0, 40, 1, most_bytes=40_000)
    attempt(tmp_path, 2, [8, 8], [0.1, 0.2], 40, 1200, 2, most_bytes=40_000)
    files = [file for _, file in parts(events_path(tmp_path, 0))]
    assert 'size": 3' in files[0].read_text()
    files[1].unlink()
    assert not any('"t": 2000.0' in file.read_text().splitlines()[1] for file in files[:1])
    run = told(tmp_path)
    assert run.size == 2
    assert run.status() == "ended"
    assert [run.workers[rank].attempt for rank in range(3)] == [2.0, 2.0, 1.0]


def test_a_part_that_goes_before_it_was_read(tmp_path):
    path = events_path(tmp_path, 0)
    log = EventLog(path, most_bytes=40_000)
    log.write("start", **start(0, 1))
    log.flush()
    run = Run(tmp_path, newest=2000)
    run.update()
    for step in range(0, 4000, 4):
        log.write("steps", **steps(step, 4, 8, 0.0, 0.1, 0.0, 0.0, 1.0))
        log.flush()
        if step == 1200:
            run.update(0.0)
    log.close()
    run.update()
    assert run.read_share == 1.0
    assert run.last_step == 3999


def test_workers_that_take_turns_wait_and_do_not_exchange(tmp_path):
    times = np.zeros((2, 4, 7))
    times[:, :, 0], times[:, :, 6] = 8, range(4)
    times[0, :, 2], times[1, :, 2] = [0.1, 0.15, 0.1, 0.15], [0.15, 0.1, 0.15, 0.1]
    times[0, :, 3], times[1, :, 3] = [0.055, 0.005, 0.055, 0.005], [0.005, 0.055, 0.005, 0.055]
    log = EventLog(events_path(tmp_path, 0))
    log.write("start", **start(0, 2))
    seen = observe(times, step=3, epoch=0, ends_epoch=False, total=16, limits=Limits.of(2))
    log.write("window", **told_of(times, seen))
    log.close()
    found = figures(told(tmp_path))
    assert found["exchange_s"] == pytest.approx(0.005)
    assert [one["waiting_s"] for one in found["workers"]] == pytest.approx([0.025, 0.025])
    assert found["samples_per_s"] == pytest.approx(16 / 0.155)
    assert found["limit_samples_per_s"] == pytest.approx(16 / 0.125)
    behind = times.copy()
    behind[1, :3], behind[1, 3] = (
        times[1, 1:],
        np.nan,
    )  # the second has left out its first step: the others are compared with their own
    late = told_of(behind, seen)
    assert late["exchange_s"] == pytest.approx(0.005)
    assert late["waiting_s"] == pytest.approx([0.025, 0.1 / 3])
    behind[1, :, 6] += 10  # no step in common: the least of their means bounds what the exchange can be
    assert told_of(behind, seen)["exchange_s"] == pytest.approx(0.03)


def locally(folder, sync):
    with paceline.init(timeout_s=30, run_dir=folder, sync=sync, balance="equal") as pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model = pace.wrap(model, optimizer)
        for x, y in pace.loader(points(1024), 16):
            F.cross_entropy(model(x), y).backward()
            time.sleep(0.02 * pace.rank)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("sync", ["local:h=64,settle=false", "gossip:every=8"])
def test_waiting_for_replicas_is_waiting(tmp_path, sync):
    """The fast worker waits at the end of every round; that it does so in none of its steps' sums is no reason to deny it."""
    begun = time.monotonic()
    ranks.run(2, locally, tmp_path, sync, timeout_s=60)
    passed = time.monotonic() - begun
    found = figures(told(tmp_path))
    assert found["policies"]["sync"] == sync.partition(":")[0]
    assert found["workers"][0]["waiting_s"] > 2 * found["workers"][0]["data_s"]  # for the other, not for data
    assert found["workers"][0]["idle_share"] > 0.5 > found["workers"][1]["idle_share"]
    assert "worker 0 waits" in " ".join(found["words"])
    assert found["samples_per_s"] > 1024 / passed
    assert found["samples_per_s"] < 16 / 0.02


def test_a_line_that_makes_no_sense_hides_nothing(tmp_path):
    run_dir = write_run(tmp_path / "run", [8, 8], [0.1, 0.2], ends=False)
    good = told(run_dir)
    lines = events_path(run_dir, 0).read_text().splitlines()
    bad = [
        {"type": "window", "t": 1.0, **window(10**11, [8, 8], [0.1, 0.2])},
        {"type": "window", "t": 1.0, **window(39, [8] * 5, [0.1] * 5)},
        {"type": "window", "t": 1.0, **window(38, [8, 8], [0.1, 0.2]), "samples_per_s": "x"},
        {"type": "window", "t": 1.0, **window(38, [8, 8], [0.1, 0.2]), "observation": {}},
        {"type": "note", "t": float("inf"), "text": "never"},
        {"type": "loss", "t": 1.0, "epoch": 1, "step": 1, "loss": float("nan"), "samples": 1},
        {"type": "round", "t": 1.0, "step": 10**12, "span": [0, 1], "num_bytes": 10**12},
        {"type": "window", "t": 1.0, **window(38, [8, 8], [0.1, 0.2]), "waiting_s": [-5.0, 1e9]},
        {"type": "loss", "t": 1.0, "epoch": 1, "step": float("inf"), "loss": 1.0, "samples": 1},
    ]
    silent = [{"type": "window", "t": 1.0, **window(39, [8, 8], [0.1, 0.2]), "samples_per_s": None}]
    text = "\n".join([*lines[:3], *map(json.dumps, bad), *lines[3:], *map(json.dumps, silent)]) + "\n"
    events_path(run_dir, 0).write_text(text)
    run = told(run_dir)
    assert run.damaged == len(bad)
    assert {**figures(run), "damaged_lines": 0, "words": []} == {**figures(good), "words": []}
    events_path(run_dir, 1).unlink()
    Console(width=80).print(frame(told(run_dir), 80))


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_terminal_shows_it(tmp_path, encoding):
    run_dir = write_run(tmp_path / "run", [8, 8], [0.1, 0.2], ends=False)
    log = EventLog(events_path(run_dir, 0))
    log.write("note", text="a \ud800 lone half, and ä")
    log.close()
    env = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "90"}
    both = f"from paceline.cli import main; main(['report', '--format', 'md', {str(run_dir)!r}]); main(['watch', '--once', {str(run_dir)!r}])"
    shown = subprocess.run([sys.executable, "-c", both], env=env, capture_output=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert ("█" in shown.stdout.decode(encoding)) == (encoding == "utf-8")
    assert b"\x1b" not in shown.stdout


def test_what_stands_in_the_way_is_said(tmp_path, capsys, monkeypatch):
    run_dir = write_run(tmp_path / "run", [8, 8], [0.1, 0.2])
    (run_dir / "events" / "worker-0002.jsonl").mkdir()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read_it = pool.submit(pipe.read_text)
        main(["report", str(run_dir), "--format", "md", "-o", str(pipe)])
        assert "2 workers" in read_it.result(30)
    assert pipe.is_fifo()
    monkeypatch.setattr("paceline.cli.report.read_runs", interrupt)
    with pytest.raises(SystemExit, match="130"):
        main(["report", str(run_dir)])
    said = capsys.readouterr().err
    assert "interrupted" in said
    assert "workers" not in said.split("interrupted")[1]


def interrupt(*_):
    raise KeyboardInterrupt
