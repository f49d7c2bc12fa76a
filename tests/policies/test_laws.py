"""One suite of laws for every balance policy."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.policies.balance import BALANCE, Affine, Bounds, DeadBand, EveryNSteps, Fixed, Smooth, policy
from paceline.types import Limits, from_plain, to_plain
from tests.policies.machines import Machines, plans, seen

EVERY = {
    **BALANCE,
    "bare affine": Affine(),
    "fixed": Fixed((1, 2, 3, 4, 5)),
    "every": EveryNSteps(Affine(), 3),
    "smooth": Smooth(Affine(), 0.5),
    "bounds": Bounds(Affine(), lower=1, cap=10_000),
    "nested": DeadBand(EveryNSteps(Smooth(Affine(), 0.7), 2)),
}
positive = st.floats(1e-4, 10.0, allow_nan=False)


@st.composite
def clusters(draw, workers=None):
    n = draw(st.integers(1, 7) if workers is None else workers)
    return Machines(
        tuple(draw(st.lists(st.floats(0, 0.5), min_size=n, max_size=n))),
        tuple(draw(st.lists(positive, min_size=n, max_size=n))),
    )


@st.composite
def limits_for(draw, n):
    cap = tuple(draw(st.lists(st.one_of(st.none(), st.integers(3, 60)), min_size=n, max_size=n)))
    return Limits.of(n, lower=draw(st.integers(1, 3)), cap=cap, granularity=draw(st.integers(1, 4)))


@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
def test_total_and_bounds_are_kept_through_any_history(name, data):
    chosen = EVERY[name]
    n = 5 if name == "fixed" else data.draw(st.integers(1, 6))
    machines = data.draw(clusters(st.just(n)))
    limits = data.draw(limits_for(n))
    state = chosen.init(n)
    for step in range(4):
        total = data.draw(st.integers(1, 200))
        if total > limits.room:
            with pytest.raises(ConfigError, match=f"{total - limits.room} too many"):
                chosen.split(total, limits, state)
            return
        split = chosen.split(total, limits, state)
        assert sum(split) == total
        assert all(0 <= b <= cap for b, cap in zip(split, limits.cap, strict=True))
        assert sum(1 for b in split if b % limits.granularity) <= 1 or total < limits.granularity
        active = [(b, low) for b, low in zip(split, limits.lower, strict=True) if b]
        if limits.granularity == 1 and total >= sum(limits.lower):
            assert all(b >= low for b, low in active)
            assert len(active) == n
        noise = data.draw(st.lists(st.floats(0.5, 2.0), min_size=n, max_size=n))
        times = tuple(t * f for t, f in zip(machines.times(split), noise, strict=True))
        decision, state = chosen.update(seen(split, times, limits, step), state)
        assert sum(decision.split) == total
        assert decision.split == chosen.split(total, limits, state)
        assert decision.reason


@pytest.mark.parametrize("name", EVERY)
def test_state_survives_json(name):
    chosen = EVERY[name]
    limits, machines = Limits.of(5), Machines((0.1,) * 5, (0.01, 0.02, 0.03, 0.04, 0.05))
    state = chosen.init(5)
    for step in range(3):
        split = chosen.split(97, limits, state)
        _, state = chosen.update(seen(split, machines.times(split), limits, step), state)
    restored = from_plain(chosen.init(5), json.loads(json.dumps(to_plain(state))))
    assert restored == state
    assert chosen.split(97, limits, restored) == chosen.split(97, limits, state)


@pytest.mark.parametrize("name", ["affine", "dbs", "edp", "dp", "bare affine"])
@given(machines=clusters(), scale=st.sampled_from([1e-3, 0.5, 8.0, 1024.0]))
def test_only_ratios_of_times_matter(name, machines, scale):
    scaled = Machines(tuple(c * scale for c in machines.fixed), tuple(a * scale for a in machines.slope))
    mine, theirs = plans(EVERY[name], machines, 120, 4), plans(EVERY[name], scaled, 120, 4)
    if scale in (0.5, 8.0, 1024.0):  # powers of two are exact in floating point
        assert mine == theirs
    else:
        for one, other in zip(mine, theirs, strict=True):
            assert max(machines.times(one)) == pytest.approx(max(machines.times(other)), rel=0.05)


@pytest.mark.parametrize("name", ["affine", "dbs", "edp", "bare affine"])
@given(machines=clusters(st.integers(2, 5)))
def test_the_order_of_workers_does_not_matter(name, machines):
    turned = Machines(machines.fixed[::-1], machines.slope[::-1])
    for one, other in zip(plans(EVERY[name], machines, 300, 4), plans(EVERY[name], turned, 300, 4), strict=True):
        assert max(machines.times(one)) == pytest.approx(max(turned.times(other)), rel=0.02, abs=max(machines.slope))


@given(machines=clusters(st.integers(2, 5)), worker=st.integers(0, 4), factor=st.floats(1.5, 5))
def test_a_slower_worker_never_gets_more(machines, worker, factor):
    worker %= len(machines.slope)
    slower = Machines(machines.fixed, tuple(a * factor if i == worker else a for i, a in enumerate(machines.slope)))
    assert plans(Affine(), slower, 200, 3)[-1][worker] <= plans(Affine(), machines, 200, 3)[-1][worker] + 1


def test_names():
    assert policy("affine").name == "affine"
    with pytest.raises(ConfigError, match="did you mean 'affine'"):
        policy("afine")
    with pytest.raises(ConfigError, match="one share per worker"):
        policy("fixed:1,x")
    with pytest.raises(ConfigError, match="positive"):
        policy("fixed:1,-2")
    with pytest.raises(ConfigError, match="2 for 3 workers"):
        policy("fixed:1,2").init(3)


def test_plain_mean_is_marked_as_such():
    assert {name: chosen.weighting for name, chosen in BALANCE.items()} == {
        "affine": "share", "equal": "share", "dbs": "share", "dp": "mean", "edp": "share",
    }  # fmt: skip
