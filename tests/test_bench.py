"""Suites, workloads, tables and records."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.bench.compare import compare
from paceline.bench.play import by_hand, check, play, turns
from paceline.bench.record import SCHEMA, figures, read
from paceline.bench.roster import contender
from paceline.bench.score import mean, score
from paceline.bench.suite import load, parse, shipped
from paceline.bench.table import middle, tables
from paceline.bench.task import Task
from paceline.bench.workloads import NAMES, workload
from paceline.bench.workloads.data import FOLDER, fashion, idx
from paceline.errors import ConfigError
from paceline.lab.cluster import Cluster, Disturbance, WorkerSpec
from paceline.lab.clusterfile import load as load_cluster
from paceline.lab.worker import pid_path

pytestmark = pytest.mark.xdist_group("bench")  # one at a time: each is many processes

GOOD = """
name = "mine"
description = "a try"
workloads = ["mlp-fixed"]
clusters = ["two-generations"]
contenders = ["ddp", "affine", "affine+bf16", "fixed:1,2,1,1"]
seeds = [3, 4]
steps = 12
warm_up = 4
"""


# ---- suites


def test_a_suite_is_read_and_its_runs_take_turns():
    suite = parse(GOOD, "s.toml")
    order = [(turn.seed, turn.contender.name) for turn in turns(suite)]
    names = ["ddp", "affine", "affine+bf16", "fixed:1,2,1,1"]
    assert order == [(3, name) for name in ["solo", *names]] + [(4, name) for name in ["solo", *names[1:], names[0]]]
    assert json.loads(json.dumps(suite.plain()))["clusters"][0]["name"] == "two-generations"


def test_those_that_ship_are_fine_and_papers_stand_beside_them():
    assert {"unlike", "dbs-paper", "het-paper", "gpu-shares", "fixed-cost", "two-sites"} <= set(shipped())
    for name in shipped():
        suite = load(name)
        assert suite.name == name
        assert suite.description
    assert {paper.cluster for paper in load("het-paper").paper} == {"het-0.1", "het-0.2"}
    everyone = {
        "ddp",
        "hand-tuned",
        "equal",
        "dbs",
        "dp",
        "edp",
        "affine",
        "accelerate",
        "fabric",
        "adaptdl",
        "torchft",
    }
    assert everyone <= set(load("unlike").contenders)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("mlp-fixed", "mlp-fixt"), r"s.toml, line 4: unknown workload 'mlp-fixt': did you mean 'mlp-fixed'"),
        (('"ddp"', '"dpp"'), r"s.toml, line 6: unknown contender 'dpp': did you mean"),
        (("two-generations", "two-generation"), r"s.toml, line 5: unknown cluster 'two-generation': did you mean"),
        (("seeds = [3, 4]", "seeds = []"), "line 7: seeds must be a list of whole numbers, not empty"),
        (("seeds = [3, 4]", "seeds = [1.5]"), "line 7: seeds must be a list of whole numbers"),
        (("steps = 12", "steps = 5"), r"line 8: steps must exceed warm_up by at least 2, got steps=5, warm_up=4"),
        (("steps = 12", "stepps = 12"), "unknown key at s.toml, line 8 'stepps': did you mean 'steps'"),
        (('workloads = ["mlp-fixed"]', ""), "a suite needs workloads"),
        (
            ("warm_up = 4", "warm_up = 4\n[[paper]]\ncluster = 'x'\ntime_ratio = 1"),
            "unknown cluster at s.toml, line 11",
        ),
    ],
)
def test_bad_suites(change, message):
    with pytest.raises(ConfigError, match=message):
        parse(GOOD.replace(*change), "s.toml")


def test_missing_suites():
    with pytest.raises(ConfigError, match="did you mean 'unlike'"):
        load("unlik")
    with pytest.raises(ConfigError, match=r"there is no suite file no\.toml"):
        load("no.toml")


def test_the_split_by_hand():
    assert by_hand(load_cluster("four-unlike"), 256) == load_cluster("four-unlike").optimum(256)[0]
    assert by_hand(load_cluster("slowed-midway"), 256) == by_hand(load_cluster("four-unlike"), 256)
    assert by_hand(load_cluster("gpu-shares-4"), 2048) == (1024, 512, 307, 205)
    capped = Cluster("c", "", (WorkerSpec(cores=1.0, max_local_batch=4), WorkerSpec(cores=1.0)), mechanism="cgroup")
    assert by_hand(capped, 16) == (4, 12)
    assert by_hand(load_cluster("cpu-plus-gpu"), 30) == (10, 10, 10)  # nobody knows


def test_a_contender_by_name():
    assert contender("affine+bf16").options == {"balance": "affine", "wrap": {"compress": "bf16"}}
    assert contender("local:h=8+norm-test:eta=0.8,most=64+sqrt+b=32").options == {
        "balance": "equal",
        "sync": "local:h=8",
        "batch": "norm-test:eta=0.8,most=64",
        "lr_rule": "sqrt",
        "batch_size": 32,
    }
    for wrong in ("affine+b=0", "affine+dbs", "affine+", "overlap+cubic"):
        with pytest.raises(ConfigError, match="contender"):
            contender(wrong)
    assert contender("hand-tuned").settings((3, 5)) == {"split": [3, 5]}
    assert contender("torchft-diloco").peer == "torchft"
    assert contender("overlap:h=8+affine").options == {"sync": "overlap:h=8", "balance": "affine"}
    assert contender("daso").options == {"sync": "daso", "balance": "equal"}
    with pytest.raises(ConfigError, match="did you mean 'overlap'"):
        contender("overlp")
    with pytest.raises(ConfigError, match="H must be a whole number"):
        contender("overlap:h=0")


# ---- workloads


@pytest.mark.parametrize("name", [name for name in NAMES if "fashion" not in name])
def test_a_workload_learns(name, tmp_path):
    """A few steps of one process: the score moves towards the target."""
    chosen = workload(name)
    task = Task(chosen, 32, 30, 30, 0, 0, 1, torch.device("cpu"), marks=tmp_path / "marks.jsonl", train_rows=256)
    model = task.model()
    with torch.no_grad():
        before = chosen.score(model.eval(), chosen.data()[1])
    model.train()
    optimizer = task.optimizer(model.parameters())
    over = False
    while not over:
        for start in range(0, 256, 32):
            task.loss(model, task.train.__getitems__(list(range(start, start + 32)))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if over := task.stepped(model):
                break
    score(tmp_path, chosen, torch.device("cpu"))
    marks = [json.loads(line) for line in (tmp_path / "marks.jsonl").read_text().splitlines()]
    assert [mark["step"] for mark in marks] == [*range(1, 31), 30]
    assert marks[0]["train_s"] == 0  # the first step warms up
    after = marks[-1]["score"]
    assert after > before if chosen.higher_is_better else after < before


def test_a_run_of_so_many_samples(tmp_path):
    chosen = workload("cnn-digits")
    task = Task(
        chosen, 32, 10, 1, 0, 0, 1, torch.device("cpu"), marks=tmp_path / "marks.jsonl", samples=200, test_samples=100
    )
    model = task.model()
    used = [30, 90, 120, 170, 230]
    assert [task.stepped(model, samples) for samples in used] == [False, False, False, False, True]
    assert {path.name for path in tmp_path.glob("replica-*")} == {"replica-3-0.pt", "replica-5-0.pt"}
    marks = [json.loads(line) for line in (tmp_path / "marks.jsonl").read_text().splitlines()]
    assert [mark["samples"] for mark in marks] == used


def test_replicas_that_differ_are_tested_as_their_mean(tmp_path):
    chosen = workload("cnn-digits")
    for rank in range(3):
        task = Task(chosen, 32, 4, 2, 0, rank, 3, torch.device("cpu"), marks=tmp_path / "marks.jsonl")
        task.apart = True
        model = task.model()
        with torch.no_grad():
            model[0].weight.add_(rank)
        for _ in range(4):
            task.stepped(model)
    torch.manual_seed(0)
    same = chosen.model()
    torch.testing.assert_close(mean(tmp_path, 2)["0.weight"], same[0].weight.detach() + 1)
    torch.testing.assert_close(mean(tmp_path, 4)["5.bias"], same[5].bias.detach())
    score(tmp_path, chosen, torch.device("cpu"))
    marks = [json.loads(line) for line in (tmp_path / "marks.jsonl").read_text().splitlines()]
    assert [mark["step"] for mark in marks if "score" in mark] == [2, 4]
    assert all(mark["loss"] > 0 for mark in marks if "score" in mark)
    assert not list(tmp_path.glob("replica-*"))


def write_idx(path, array, *, cut=0, head=b"\0\0\x08"):
    data = head + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    data = data[: len(data) - cut]
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def fashion_folder(folder, **kwargs):
    generator = np.random.default_rng(0)
    for kind, count in (("train", 20), ("t10k", 8)):
        write_idx(
            folder / f"{kind}-images-idx3-ubyte.gz", generator.integers(0, 256, (count, 28, 28), np.uint8), **kwargs
        )
        write_idx(folder / f"{kind}-labels-idx1-ubyte", generator.integers(0, 10, (count,), np.uint8))


def test_fashion_from_a_folder(tmp_path, monkeypatch):
    fashion_folder(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    train, test = fashion(32)
    assert train.tensors[0].shape == (20, 1, 32, 32)
    assert len(test) == 8
    assert train.tensors[1].dtype == torch.int64


def test_a_dataset_that_is_missing_truncated_or_something_else(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(ConfigError, match="apt install dataset-fashion-mnist"):
        fashion()
    fashion_folder(tmp_path, cut=5)
    with pytest.raises(ConfigError, match="is truncated: 15675 values where its header says 15680"):
        fashion()
    fashion_folder(tmp_path)
    whole = (tmp_path / "train-images-idx3-ubyte.gz").read_bytes()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(whole[:100])
    with pytest.raises(ConfigError, match="may be truncated; get it again"):
        fashion()
    write_idx(tmp_path / "x", np.zeros(3, np.uint8), head=b"PK\x03")
    with pytest.raises(ConfigError, match="must be an idx file of bytes, but begins with 504b0301"):
        idx(tmp_path / "x")
    fashion_folder(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(3, np.uint8))
    with pytest.raises(ConfigError, match=r"as many labels beside them, got shapes \(20, 28, 28\) and \(3,\)"):
        fashion()


# ---- records


def made_up(scale=1.0, **changes):
    """A record of two contenders, one of which failed once."""
    suite = {**parse(GOOD, "s.toml").plain(), "contenders": ["ddp", "affine", "torchft"], "paper": [
        {"cluster": "two-generations", "contender": "affine", "against": "ddp", "time_ratio": 0.6, "source": "nowhere"}
    ]}  # fmt: skip

    def run(name, seed, rate, **more):
        figures = {
            "samples_per_s": rate * scale,
            "median_step_s": 1 / rate,
            "share_of_optimum": rate / 1000,
            "time_to_target_s": 5000 / rate,
            "final_score": 0.9,
            "plans": 2,
            "split": [1, 2],
            "step_s": [0.1],
            "tests": [[1, 0.1, 0.5]],
        }
        base = {"workload": "mlp-fixed", "cluster": "two-generations", "contender": name, "seed": seed}
        return {**base, **({"status": "ok", "figures": figures} | more)}

    alone = {
        "solo": {"samples": [3, 5], "alone_per_s": [400.0 * scale, 600.0 * scale], "together_per_s": [400.0, 500.0]}
    }
    case = {
        "workload": "mlp-fixed",
        "cluster": "two-generations",
        "description": "old and new",
        "mechanism": "paced",
        "batch_size": 128,
        "target": 0.9,
        "higher_is_better": True,
    }
    runs = [
        run("solo", 3, 1.0, **alone),
        run("ddp", 3, 400.0),
        run("ddp", 4, 420.0),
        run("affine", 3, 900.0),
        run("affine", 4, 0.0 + 880.0),
        run("torchft", 3, 1.0, status="not installed", reason="pip said\nno | way"),
    ]
    record = {
        "schema": SCHEMA,
        "started": "2026-11-15T08:00:00",
        "suite": suite,
        "machine": {"cores": 2, "python": "3.11", "gpu": None},
        "versions": {"torch": "2", "paceline": "0", "numpy": "1"},
        "cases": [case],
        "runs": runs,
    }
    return {**record, **changes}


def test_the_table():
    text = tables(made_up())
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if "|" in line
    }
    assert rows["affine"][:5] == ["1.1 ± 0.0", "890 ± 10", "0.890", "0.890", "5.6 ± 0.1 s"]
    assert rows["ddp"][2] == "0.410"
    assert rows["torchft"][0] == "not installed: no / way"
    assert rows["affine / ddp"] == ["0.600", "0.461", "nowhere"]
    assert "[3, 5]: 1000 samples/s in all; all at once without exchange: 900" in text
    assert middle([2.0]) == (2.0, 0.0)


def test_a_failed_run_among_good_ones_is_told():
    record = made_up()
    record["runs"][2] |= {"status": "killed", "reason": "did not end within 3 s"}
    assert "ddp (1 of 2 runs: killed: did not end within 3 s)" in tables(record)


def test_comparing_records():
    rows = compare(made_up(), made_up(scale=2.0))
    assert {row["contender"]: row["verdict"] for row in rows} == {"ddp": "same", "affine": "same"}
    assert rows[0]["ratio"] == pytest.approx(2)
    assert rows[0]["efficiency_ratio"] == pytest.approx(1)
    slower = made_up()
    for run in slower["runs"]:
        if run["contender"] == "affine":
            run["figures"]["samples_per_s"] *= 0.8
    verdicts = {row["contender"]: row["verdict"] for row in compare(made_up(), slower)}
    assert verdicts == {"ddp": "same", "affine": "slower"}


def test_a_record_of_the_future_and_no_record(tmp_path):
    with pytest.raises(ConfigError, match="must be the folder of a record"):
        read(tmp_path)
    (tmp_path / "record.json").write_text(json.dumps({"schema": SCHEMA + 1}))
    with pytest.raises(ConfigError, match="use a newer one"):
        read(tmp_path)


def test_figures_of_a_run(tmp_path):
    marks = [{"step": step, "train_s": 0.1 * (step - 1), "samples": 20 * step} for step in range(1, 7)]
    marks.insert(3, {"step": 3, "train_s": 0.2, "score": 0.7})
    marks.append({"step": 6, "train_s": 0.5, "score": 0.95})
    (tmp_path / "marks.jsonl").write_text("\n".join(map(json.dumps, marks)))
    (tmp_path / "lab").mkdir()
    cluster = Cluster("c", "", (WorkerSpec(0.04, 0.001),) * 2)
    (tmp_path / "lab" / "cluster.json").write_text(json.dumps(cluster.plain()))
    for worker in range(2):
        lines = [
            {"step": s, "samples": 10, "due_s": 0.05, "took_s": 0.05, "at": 0.1 * s, "elapsed_s": 0.1 * s}
            for s in range(6)
        ]
        (tmp_path / "lab" / f"worker-{worker:04d}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = figures(tmp_path, 0.9, 2, higher_is_better=True)
    assert found["samples_per_s"] == pytest.approx(200)
    assert found["median_step_s"] == pytest.approx(0.1)
    assert found["time_to_target_s"] == 0.5
    assert found["final_score"] == 0.95
    assert found["share_of_optimum"] == pytest.approx(0.5)
    assert figures(tmp_path, 0.99, 2, higher_is_better=True)["time_to_target_s"] is None
    assert figures(tmp_path, 0.8, 2, higher_is_better=False)["time_to_target_s"] == 0.2


# ---- for real

SUITE = """
description = "a try"
workloads = ["mlp-fixed"]
clusters = ["pair.toml"]
contenders = ["affine", "accelerate"]
steps = 10
warm_up = 4
test_every = 5
timeout_s = TIMEOUT
"""


def bench(*arguments, cwd, **env):
    command = [sys.executable, "-m", "paceline.cli", "bench", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, env={**os.environ, **env})


def put(folder, timeout_s):
    (folder / "pair.toml").write_text("[[workers]]\nper_sample_s = 0.0005\n[[workers]]\nper_sample_s = 0.001\n")
    (folder / "s.toml").write_text(SUITE.replace("TIMEOUT", str(timeout_s)))


@pytest.mark.timeout(300)
def test_a_suite_for_real_with_a_peer_that_cannot_be_installed(tmp_path):
    put(tmp_path, 100)
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PACELINE_PEERS": str(tmp_path / "peers")}
    done = bench("s.toml", "--out", "record", "--json", cwd=tmp_path, **nothing)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    by_name = {run["contender"]: run for run in record["runs"]}
    assert by_name["solo"]["status"] == by_name["affine"]["status"] == "ok", by_name
    assert by_name["accelerate"]["status"] == "not installed"
    assert "accelerate" in by_name["accelerate"]["reason"]
    assert len(by_name["affine"]["figures"]["step_s"]) == 9
    assert sum(by_name["affine"]["figures"]["split"]) == 128
    folder = tmp_path / "record"
    names = {path.name for path in folder.iterdir()}
    assert names == {"record.json", "table.md", "raw.tar.gz", "mlp-fixed@pair.png"}
    assert "not installed" in (folder / "table.md").read_text()
    with tarfile.open(folder / "raw.tar.gz") as raw:
        kept = [Path(name) for name in raw.getnames()]
    assert any(path.match("affine/seed-1/events/worker-0001.jsonl") for path in kept)
    again = bench("s.toml", "--out", "record", cwd=tmp_path, **nothing)
    assert again.returncode == 2
    assert "the record folder must not exist yet: record does" in again.stderr
    (folder / "table.md").unlink()
    assert bench("render", "record", cwd=tmp_path).returncode == 0
    assert (folder / "table.md").exists()
    same = bench("compare", "record", "record", "--json", cwd=tmp_path)
    assert [row["verdict"] for row in json.loads(same.stdout)] == ["same"]


@pytest.mark.timeout(200)
def test_a_contender_that_hangs_is_killed_and_the_rest_goes_on(tmp_path):
    """A worker stops for good in the middle: its run is killed at the timeout, and the next one is made."""
    put(tmp_path, 100)
    suite = parse(SUITE.replace("TIMEOUT", "100"), "s.toml", tmp_path)
    hung = replace(
        suite.clusters[0], name="hung", disturbances=(Disturbance("pause", 1, seconds=(1e6, 1e6), from_step=3),)
    )
    suite = replace(suite, clusters=(hung, *suite.clusters), contenders=("ddp",), timeout_s=25.0)
    told, pids = [], []

    def tell(turn, run):
        told.append(run)
        lab = tmp_path / "raw" / turn.place / "lab"
        pids.extend(int(pid_path(lab, worker).read_text()) for worker in range(2))
        if turn.cluster.name == "hung":
            steps = (tmp_path / "raw" / turn.place / "marks.jsonl").read_text().splitlines()
            assert len(steps) < suite.steps

    play(suite, tmp_path / "raw", tmp_path / "peers", tell, limit=False)
    assert [(run["cluster"], run["status"]) for run in told] == [("hung", "killed"), ("pair", "ok")]
    assert told[0]["reason"] == "did not end within 25 s"
    assert len(pids) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_solo_run_that_failed_once_does_not_spoil_the_table():
    record = made_up()
    good = record["runs"][0]
    record["runs"].insert(0, {**good, "seed": 9, "status": "killed", "reason": "slow"})
    del record["runs"][0]["solo"]
    assert "[3, 5]: 1000 samples/s in all" in tables(record)
    record["runs"] = [run for run in record["runs"] if "solo" not in run]
    assert "Workers alone: killed: slow." in tables(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_rows": 100}, "batch_size must not exceed the rows to train on: mlp-fixed has 100, got batch_size=128"),
        ({"batch_size": 3}, "at least one sample per worker: cluster 'two-generations' has 4, got 3"),
        ({"batch_size": 1437, "clusters": (Cluster("tiny", "", (WorkerSpec(max_local_batch=4),)),)}, "holds at most 4"),
    ],
)
def test_what_would_loop_for_ever_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(parse(GOOD, "s.toml"), **change))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "unknown suite 'nosuch'"),
        (["unlike", "--contenders", "ddp,horovod"], "got 'horovod'"),
        (["unlike", "--seeds", "one"], "--seeds must be whole numbers"),
        (["compare", "a", "b"], "must be the folder of a record"),
    ],
)
def test_bad_commands(arguments, words, tmp_path):
    done = bench(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
