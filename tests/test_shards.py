"""Shard plans: made, kept, changed, looked at; from Python and from the command line."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import numpy as np
import pytest

import paceline
from paceline import shards
from paceline.cli import main
from paceline.errors import ConfigError
from tests.policies.test_partition import blobs


def data(count=900, seed=0):
    features, labels = blobs(count, seed=seed)
    return np.asarray(features), labels


def test_a_plan_from_start_to_end(tmp_path):
    features, labels = data()
    told = []
    plan = paceline.partition(features, labels, speeds=[1, 2, 3], tell=lambda what, share: told.append((what, share)))
    assert plan.method == "exact"
    assert [len(plan.samples(part)) for part in range(3)] == plan.quota.sum(axis=0).tolist()
    assert sorted(np.concatenate([plan.samples(part) for part in range(3)])) == list(range(900))
    assert plan.metrics["class_error"] == 0
    assert plan.metrics["mmd_ratio"] < 0.4
    assert [share for _, share in told] == sorted(share for _, share in told)
    plan.save(tmp_path)
    again = shards.load(tmp_path, features, labels)
    assert (again.parts == plan.parts).all()
    assert again.metrics == plan.metrics
    assert again.speeds == (1.0, 2.0, 3.0)

    faster, moves = again.rebalance([2, 2, 3])
    assert len(moves) == moves.fewest == int((faster.parts != plan.parts).sum())
    assert (faster.parts[moves.samples] == moves.after).all()
    assert (plan.parts[moves.samples] == moves.before).all()
    gone, moves = faster.rebalance([2, 0, 3])
    assert len(gone.samples(1)) == 0
    assert len(moves) == moves.fewest == len(faster.samples(1))
    joined, moves = gone.rebalance([2, 0, 3, 1])
    assert len(joined.samples(3)) > 100
    assert len(moves) == moves.fewest
    with pytest.raises(ConfigError, match="name at least 4 speeds"):
        joined.rebalance([1, 1])

    more, more_labels = data(90, seed=0)
    longer, moves = plan.extend(more, more_labels)
    assert len(longer.parts) == 990
    assert (moves.before[moves.samples >= 900] == -1).all()
    assert len(moves) == moves.fewest
    longer.save(tmp_path)
    assert len(shards.load(tmp_path).parts) == 990
    assert len(list(tmp_path.iterdir())) == 2  # the old arrays are gone


def test_same_seed_same_bytes(tmp_path):
    features, labels = data()
    for name in ("a", "b"):
        paceline.partition(features, labels, speeds=[1, 2], seed=5).save(tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    other = paceline.partition(features, labels, speeds=[1, 2], seed=6, method="balanced")
    assert (other.parts != shards.load(tmp_path / "a").parts).any()


def test_fewer_columns(tmp_path):
    features, labels = data()
    plan = paceline.partition(features, labels, speeds=[1, 2], columns=4)
    plan.save(tmp_path)
    again = shards.load(tmp_path, features, labels)
    assert again.columns == 4
    faster, moves = again.rebalance([1, 1])
    assert len(moves) == moves.fewest
    assert faster.metrics["class_error"] == 0
    assert faster.metrics["mmd_ratio"] < 1
    with pytest.raises(ConfigError, match="columns must be at least 1"):
        paceline.partition(features, labels, speeds=[1, 2], columns=0)


def test_swaps_within_a_time():
    features, labels = data()
    plain = paceline.partition(features, labels, speeds=[1, 2], method="stratified")
    better = paceline.partition(features, labels, speeds=[1, 2], method="stratified", refine_s=0.3)
    assert better.metrics["mmd_ratio"] < plain.metrics["mmd_ratio"]
    assert better.metrics["class_error"] == 0


def test_bad_input():
    features, labels = data(60)
    holes = features.copy()
    holes[17, 3] = np.nan
    for arguments, text in (
        ((holes, labels, [1, 2]), "row 17 holds NaN"),
        ((features, labels[:-1], [1, 2]), "got 59 and 60"),
        ((features, labels, [1] * 61), "got 60 for 61 parts"),
        ((features, labels, [1, 0, -2]), "part 2 has -2"),
        ((features[0], None, [1]), "must be a matrix"),
        ((features.astype(str), None, [1]), "must be a matrix of numbers"),
        ((features, labels.reshape(-1, 1, 1), [1]), "must be a vector"),
    ):
        with pytest.raises(ConfigError, match=text):
            paceline.partition(arguments[0], arguments[1], speeds=arguments[2])
    one = paceline.partition(features, labels, speeds=[3])
    assert set(one.parts) == {0}
    small = paceline.partition(
        features, np.array([0] * 58 + [1, 1]), speeds=[1, 1, 1]
    )  # a class smaller than the parts
    assert np.bincount(small.parts).tolist() == [20, 20, 20]
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        paceline.partition(features, labels, speeds=[1], method="exat")


def test_plans_of_other_data_and_damaged_ones(tmp_path):
    features, labels = data(80)
    plan = paceline.partition(features, labels, speeds=[1, 2])
    plan.save(tmp_path)
    other = features.copy()
    other[3, 0] += 1
    with pytest.raises(ConfigError, match="belongs to the data it was made for"):
        shards.load(tmp_path, other, labels)
    with pytest.raises(ConfigError, match="needs its data"):
        shards.load(tmp_path).rebalance([1, 1])
    with pytest.raises(ConfigError, match="there is no"):
        shards.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="with labels"):
        plan.extend(features)
    with pytest.raises(ConfigError, match="must have 16 columns"):
        plan.extend(features[:, :3], labels)
    arrays = next(tmp_path.glob("*.npz"))
    content = arrays.read_bytes()
    arrays.write_bytes(content[:-20])
    with pytest.raises(ConfigError, match="damaged"):
        shards.load(tmp_path)
    arrays.write_bytes(content)
    meta = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**meta, "schema": 99}))
    with pytest.raises(ConfigError, match="update paceline"):
        shards.load(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        shards.load(tmp_path)


def test_a_full_disk_leaves_the_old_plan(tmp_path, monkeypatch):
    features, labels = data(80)
    paceline.partition(features, labels, speeds=[1, 2]).save(tmp_path)
    before = shards.load(tmp_path)
    newer = paceline.partition(features, labels, speeds=[2, 1])
    real = shards._write
    for fails_at in (1, 2):
        calls = []

        def full(path, content, calls=calls, fails_at=fails_at):
            calls.append(path)
            if len(calls) == fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(path, content)

        monkeypatch.setattr(shards, "_write", full)
        with pytest.raises(ConfigError, match=r"No space left on device.*as it was"):
            newer.save(tmp_path)
        assert (shards.load(tmp_path).parts == before.parts).all()
    monkeypatch.setattr(shards, "_write", real)
    newer.save(tmp_path)
    assert (shards.load(tmp_path).parts == newer.parts).all()


def test_the_command(tmp_path, capsys):
    features, labels = data(300)
    np.save(tmp_path / "f.npy", features)
    np.save(tmp_path / "l.npy", labels)
    where = ["--features", str(tmp_path / "f.npy"), "--labels", str(tmp_path / "l.npy")]
    main(["partition", *where, "--speeds", "1,2,3", "--out", str(tmp_path / "out"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == [50, 100, 150]
    assert found["class_error"] == 0
    plan = shards.load(tmp_path / "out", features, labels)
    assert [len(plan.samples(part)) for part in range(3)] == found["sizes"]
    assert (tmp_path / "out" / "plan.png").read_bytes()[:4] == b"\x89PNG"
    main(["partition", *where, "--speeds", "1,2", "--method", "stratified", "--out", str(tmp_path / "two")])
    assert "of a random division" in capsys.readouterr().out
    (tmp_path / "bad.npy").write_text("no")
    for arguments, text in (
        (["--features", str(tmp_path / "none.npy"), "--speeds", "1"], "there is no file"),
        (["--features", str(tmp_path / "bad.npy"), "--speeds", "1"], "must be a .npy file"),
        ([*where, "--speeds", "1;2"], "numbers with commas"),
        ([*where, "--speeds", "1", "--method", "x"], "partition method"),
    ):
        with pytest.raises(SystemExit):
            main(["partition", *arguments, "--out", str(tmp_path / "x")])
        assert text in capsys.readouterr().err


def test_partitioning_needs_no_torch():
    code = (
        "import sys, numpy as np, paceline; paceline.partition(np.random.rand(50, 3), speeds=[1, 2]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
