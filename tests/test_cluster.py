from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.lab.cluster import Cluster, Disturbance, Link
from paceline.lab.clusterfile import load, parse, shipped
from paceline.lab.tomlfile import line_numbers

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
    asked = "two-generations one-straggler long-tail-8 noisy-neighbour two-sites-slow-link gpu-shares-4 cpu-plus-gpu random-drift"
    assert {*asked.split(), "four-unlike", "four-equal", "slowed-midway"} <= set(names)
    for name in names:
        assert load(name).name == name
        assert load(name).description


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[workers]]\nspeed = -1", r"c.toml, line 2: speed must be a number above 0, got -1"),
        ("[[workers]]\nspeed = 0", "speed must be a number above 0"),
        ("[[workers]]\nspeed = nan", "speed must be a number"),
        ("[[workers]]\nper_sample_s = -0.1", "per_sample_s must be a number of at least 0"),
        ("[[workers]]\nspede = 1", "unknown key at c.toml, line 2 'spede': did you mean 'speed'"),
        ("colour = 1\n[[workers]]", "unknown key at c.toml, line 1 'colour'"),
        ("name = 'x'", r"at least one \[\[workers\]\] table"),
        ("workers = 3", "must be .*tables"),
        ("mechanism = 'pased'\n[[workers]]", "did you mean 'paced'"),
        ("[[workers]]\ncount = 1.5", "count must be a whole number"),
        ("[[workers]]\n[[disturbances]]\nworker = 4\nfactor = 2", r"line 3: worker must be 0 to 0 or \"all\", got 4"),
        ("[[workers]]\n[[disturbances]]\nworker = 0\nkind = 'slo'", "did you mean 'slow'"),
        ("[[workers]]\n[[disturbances]]\nworker = 0", "line 2: kind 'slow' needs factor"),
        ("[[workers]]\n[[disturbances]]\nworker = 0\nkind = 'delay'", "needs seconds"),
        ("[[workers]", "not valid TOML"),
        (
            "[[workers]]\ncores = 1",
            r"line 2: cores is for mechanism cgroup and mixed, but this cluster's mechanism is 'paced'",
        ),
        ("mechanism = 'cgroup'\n[[workers]]\ncount = 2", r"line 2: mechanism 'cgroup' needs cores for every worker"),
        ("mechanism = 'cgroup'\n[[workers]]\ncores = 0", "line 3: cores must be a number above 0"),
        ("mechanism = 'mps'\n[[workers]]\ngpu_share = 120", "line 3: gpu_share must be .* at most 100, got 120"),
        ("mechanism = 'mixed'\n[[workers]]\ndevice = 'tpu'", "unknown device at c.toml, line 3 'tpu'"),
        ("mechanism = 'mixed'\n[[workers]]\ndevice = 'cpu'\ngpu_share = 5", "line 4: gpu_share means nothing"),
        ("[[workers]]\n[[nodes]]\n[[nodes.workers]]", r"\[\[workers\]\] of one machine or \[\[nodes\]\]"),
        ("[[nodes]]\nname = 'a'", r"line 1: a node must have at least one \[\[nodes.workers\]\]"),
        ("[[nodes]]\nname = 'a'\n[[nodes.workers]]\n[[nodes]]\nname = 'a'\n[[nodes.workers]]", "line 5: nodes must"),
        ("[[nodes]]\n[[nodes.workers]]\n[nodes.link]\nup_mbit = -1", "line 4: up_mbit must be a number above 0"),
        ("[[nodes]]\nlink = { speed = 3 }\n[[nodes.workers]]", "unknown key at c.toml, line 2 'speed'"),
        ("[[nodes]]\n[[nodes.workers]]\n[[disturbances]]\nkind = 'drop'\nnode = 'x'", "unknown node at c.toml, line 5"),
        (
            "mechanism = 'mps'\n[[workers]]\ngpu_share = 5\n[[disturbances]]\nworker = 0\nfactor = 2",
            "needs mechanism paced",
        ),
        (
            "mechanism = 'cgroup'\n[[workers]]\ncores = 1\n[[disturbances]]\nworker = 0\nkind = 'drift'\nspread = 1",
            "line 6: kind 'drift' needs a paced cluster",
        ),
        (
            "[[workers]]\n[[disturbances]]\nworker = 0\nkind = 'pause'\nseconds = 0",
            "line 5: seconds must be a number above",
        ),
        ("[[workers]]\n[[disturbances]]\nworker = 0\nkind = 'pause'\nseconds = 1\nfactor = 2", "unknown key .* line 6"),
        (
            "[[workers]]\n[[disturbances]]\nworker = 0\nkind = 'bursts'\nseconds = [2, 1]",
            r"line 5: seconds must be two numbers \[least, most\]",
        ),
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


NODES = """
[[nodes]]
name = "a"
link = { up_mbit = 100, latency_ms = 5 }
[[nodes.workers]]
count = 2
[[nodes.workers]]
speed = 2
[[nodes]]
name = "b"
[[nodes.workers]]
memory_mib = 64
[nodes.link]
down_mbit = 50
[[disturbances]]
kind = "drop"
node = "b"
from_s = 1
until_s = 2
[[disturbances]]
kind = "drift"
worker = "all"
spread = 0.3
most = 2
every_steps = 5
"""


def test_nodes_and_links():
    cluster = parse(NODES, "n.toml")
    assert [(node.name, node.num_workers) for node in cluster.nodes] == [("a", 3), ("b", 1)]
    assert [cluster.node_of(worker) for worker in range(4)] == [0, 0, 0, 1]
    assert cluster.nodes[0].link == Link(100, None, 5)
    assert cluster.nodes[1].link == Link(None, 50)
    assert cluster.linked
    assert not parse(GOOD, "x.toml").linked
    assert cluster.workers[3].memory_mib == 64
    assert [one.kind for one in cluster.disturbances] == ["drop", *["drift"] * 4]
    assert Cluster.from_plain(json.loads(json.dumps(cluster.plain()))) == cluster


def test_the_time_of_a_sum_over_links():
    cluster = parse(NODES, "n.toml")
    # 4 workers: 6 turns of a quarter of the bytes over the slowest link, each 5 ms late
    assert cluster.exchange_s(1_000_000) == pytest.approx(1.5 * 8 / 50 + 6 * 0.005)
    assert parse(GOOD, "x.toml").exchange_s(1_000_000) == 0


@given(
    seed=st.integers(0, 1000),
    worker=st.integers(0, 7),
    spread=st.floats(0, 3),
    most=st.floats(1, 8),
    step=st.integers(0, 400),
)
def test_drift_stays_within_bounds_and_is_the_same_for_all(seed, worker, spread, most, step):
    drift = Disturbance("drift", worker, spread=spread, most=most, seed=seed, every_steps=7)
    factor, seconds = drift.felt(step)
    assert 1 / most * 0.999 <= factor <= most * 1.001
    assert seconds == 0
    assert (
        Disturbance("drift", worker, spread=spread, most=most, seed=seed, every_steps=7).felt(step - step % 7)[0]
        == factor
    )


def test_bursts_come_as_often_as_asked_and_last_as_long():
    bursts = Disturbance("bursts", 1, chance=0.1, seconds=(5, 10), lasts=(4, 20), every_steps=3, seed=7)
    periods = [bursts.felt(3 * period)[1] for period in range(4000)]
    assert bursts.felt(3 * 50 + 2) == bursts.felt(3 * 50)
    sizes = [size for size in periods if size]
    assert all(5 <= size <= 10 for size in sizes)
    lengths = [len(list(run)) for size, run in itertools.groupby(periods) if size]
    assert min(lengths) >= 4
    assert max(lengths) <= 20
    # a burst of 12 periods on average, then 9 without on average (chance 0.1 each)
    assert len(sizes) / 4000 == pytest.approx(12 / (12 + 9), abs=0.06)


def test_lines_of_odd_files():
    text = 'a = """\n[[x]]\nb = 1\n"""\n\n[[x]] # one\nc = 1\n  [x.y]\n"d" = 2\n[[x]]\n[[x.z]]\n[[x.z]]\ne=1\n[[x]]\n[[x.z]]'
    assert line_numbers(text) == {
        ("a",): 1,
        ("x", 0): 6,
        ("x", 0, "c"): 7,
        ("x", 0, "y"): 8,
        ("x", 0, "y", "d"): 9,
        ("x", 1): 10,
        ("x", 1, "z", 0): 11,
        ("x", 1, "z", 1): 12,
        ("x", 1, "z", 1, "e"): 13,
        ("x", 2): 14,
        ("x", 2, "z", 0): 15,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[workers]]\nmax_local_batch = 0", "line 2: max_local_batch must be a whole number of at least 1"),
        ("[[workers]]\ncount = 0", "line 2: count must be a whole number of at least 1"),
        ("[[workers]]\nspeed = 1" + 400 * "0", "line 2: speed must be a number above 0"),
        ("name = 'a/b'\n[[workers]]", "line 1: name must be letters, digits"),
        ("mechanism = 'cgroup'\n[[workers]]\ncores = 0.001", "line 3: cores must be at least 0.01"),
        (
            "[[workers]]\n[[disturbances]]\nworker = 0\nfactor = 2\nfrom_step = 5\nuntil_step = 5",
            "line 6: until_step must come after from_step, got 5",
        ),
    ],
)
def test_more_bad_files(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, "c.toml")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "c.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="must be a readable text file in UTF-8"):
        load(str(tmp_path / "c.toml"))
