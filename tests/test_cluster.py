from __future__ import annotations

import itertools

import pytest

from paceline.errors import ConfigError
from paceline.lab.cluster import Cluster, load, parse, shipped

GOOD = """
name = "x"
fixed_s = 0.02
per_sample_s = 0.006
[[workers]]
count = 2
speed = 3
[[workers]]
fixed_s = 0.03
max_local_batch = 8
[[disturbances]]
worker = 2
kind = "slow"
factor = 3.0
from_step = 10
until_step = 20
[[disturbances]]
worker = 0
kind = "delay"
seconds = 0.5
from_s = 1.0
until_s = 2.0
"""


def test_a_file_is_read():
    cluster = parse(GOOD, "x.toml")
    assert [w.per_sample_s for w in cluster.workers] == pytest.approx([0.002, 0.002, 0.006])
    assert [w.fixed_s for w in cluster.workers] == [0.02, 0.02, 0.03]
    assert cluster.step_s(2, 10, 9, 0.0) == pytest.approx(0.09)
    assert cluster.step_s(2, 10, 10, 0.0) == pytest.approx(0.27)
    assert cluster.step_s(2, 10, 20, 0.0) == pytest.approx(0.09)
    assert cluster.step_s(0, 10, 0, 1.5) == pytest.approx(0.54)
    assert cluster.step_s(0, 10, 0, 2.5) == pytest.approx(0.04)
    assert Cluster.from_plain(cluster.plain()) == cluster


def test_the_optimum_is_the_optimum():
    cluster = parse(GOOD, "x.toml")
    split, time_s = cluster.optimum(20, step=12)
    best = min(
        max(cluster.step_s(w, b, 12, 0.0) for w, b in enumerate(one))
        for one in itertools.product(range(1, 21), range(1, 21), range(1, 9))
        if sum(one) == 20
    )
    assert sum(split) == 20
    assert time_s == pytest.approx(best)


def test_those_that_ship():
    names = [cluster.name for cluster in shipped()]
    assert {"four-unlike", "four-equal", "one-straggler", "slowed-midway", "two-generations", "noisy-neighbour"} <= set(
        names
    )
    for name in names:
        assert load(name).name == name
        assert load(name).description


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[workers]]\nspeed = -1", r"workers entry 1: speed must be a number above 0, got -1"),
        ("[[workers]]\nspeed = 0", "speed must be a number above 0"),
        ("[[workers]]\nspeed = nan", "speed must be a number"),
        ("[[workers]]\nper_sample_s = -0.1", "per_sample_s must be a number of at least 0"),
        ("[[workers]]\nspede = 1", "unknown key in c.toml, workers entry 1 'spede': did you mean 'speed'"),
        ("colour = 1\n[[workers]]", "unknown key in c.toml 'colour'"),
        ("name = 'x'", r"at least one \[\[workers\]\] table"),
        ("workers = 3", "must be .*tables"),
        ("mechanism = 'pased'\n[[workers]]", "did you mean 'paced'"),
        ("[[workers]]\ncount = 1.5", "count must be a whole number"),
        ("[[workers]]\n[[disturbances]]\nworker = 4\nfactor = 2", "worker must be 0 to 0, got 4"),
        ("[[workers]]\n[[disturbances]]\nworker = 0\nkind = 'slo'", "did you mean 'slow'"),
        ("[[workers]]\n[[disturbances]]\nworker = 0", "needs a factor"),
        ("[[workers]]\n[[disturbances]]\nworker = 0\nkind = 'delay'", "needs seconds"),
        ("[[workers]", "not valid TOML"),
    ],
)
def test_bad_files(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, "c.toml")


def test_missing_files():
    with pytest.raises(ConfigError, match=r"there is no cluster file no\.toml"):
        load("no.toml")
    with pytest.raises(ConfigError, match="did you mean 'four-unlike'"):
        load("four-unlik")
