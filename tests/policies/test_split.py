"""Dividing a total into whole batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.policies.balance import Affine, Equal
from paceline.policies.balance.level import largest_remainder, least_makespan, water_level
from paceline.policies.balance.shares import split_by_shares
from paceline.types import Limits


def test_golden_rounding_of_the_dbs_paper():
    ideal = np.array([13.7, 16.5, 19.6, 14.2])
    assert largest_remainder(ideal, 64, np.ones(4, np.int64), np.full(4, 64)).tolist() == [14, 16, 20, 14]


def test_three_equal_workers():
    assert sorted(split_by_shares((1.0, 1.0, 1.0), 64, Limits.of(3))) == [21, 21, 22]


@st.composite
def problems(draw):
    n = draw(st.integers(1, 4))
    lower = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    cap = [low + draw(st.integers(0, 7)) for low in lower]
    total = draw(st.integers(sum(lower), sum(cap)))
    fixed = draw(st.lists(st.one_of(st.just(0.0), st.floats(0, 3)), min_size=n, max_size=n))
    slope = draw(st.lists(st.floats(1e-3, 100), min_size=n, max_size=n))
    return fixed, slope, total, lower, cap


@given(problems())
def test_least_makespan_is_optimal(problem):
    fixed, slope, total, lower, cap = problem
    split = least_makespan(np.array(fixed), np.array(slope), total, np.array(lower), np.array(cap))
    assert split.sum() == total
    assert (split >= lower).all()
    assert (split <= cap).all()

    def makespan(batches):
        return max(c + a * b for c, a, b in zip(fixed, slope, batches, strict=True))

    ranges = (range(low, high + 1) for low, high in zip(lower, cap, strict=True))
    best = min(makespan(one) for one in itertools.product(*ranges) if sum(one) == total)
    assert makespan(split) <= best * (1 + 1e-9)


@given(st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_the_level_is_common_to_all_that_are_free(n, seed):
    random = np.random.default_rng(seed)
    fixed, slope = random.uniform(0, 1, n), random.uniform(0.01, 1, n)
    lower, cap = np.ones(n), random.uniform(5, 50, n)
    batch = water_level(fixed, slope, float(min(cap.sum(), 10 * n)), lower, cap)
    assert batch.sum() == pytest.approx(min(cap.sum(), 10 * n))
    level = fixed + slope * batch
    free = (batch > lower + 1e-9) & (batch < cap - 1e-9)
    if free.any():
        top = level[free].max()
        assert level[free].min() == pytest.approx(top)
        assert (level[batch >= cap - 1e-9] <= top + 1e-9).all()
        assert (level[batch <= lower + 1e-9] >= top - 1e-9).all()


def test_hundred_thousand_random_plans():
    random = np.random.default_rng(0)
    for _ in range(100_000 // 50):
        n = int(random.integers(1, 9))
        limits = Limits.of(n, cap=tuple(int(c) for c in random.integers(20, 200, n)))
        shares = tuple(random.uniform(0.01, 1, n).tolist())
        for total in random.integers(1, 20 * n + 1, 50).tolist():
            split = split_by_shares(shares, total, limits)
            assert sum(split) == total
            assert all(0 <= b <= c for b, c in zip(split, limits.cap, strict=True))
            if total >= n:
                assert min(split) >= 1


@pytest.mark.parametrize(
    ("total", "workers", "lower", "expected"),
    [
        (3, 4, 1, (1, 1, 1, 0)),  # a global batch smaller than the number of workers
        (1, 4, 1, (1, 0, 0, 0)),
        (5, 4, 2, (3, 2, 0, 0)),  # who takes part takes at least the lower bound
        (3, 4, 8, (3, 0, 0, 0)),  # not even one worker's lower bound
    ],
)
def test_idle_workers_when_the_batch_does_not_reach(total, workers, lower, expected):
    equal = Equal()
    assert equal.split(total, Limits.of(workers, lower=lower), equal.init(workers)) == expected


def test_the_slowest_idle_first():
    affine = Affine()
    state = affine.init(3)
    from tests.policies.machines import Machines, seen

    machines = Machines((0.0,) * 3, (0.03, 0.01, 0.02))
    limits = Limits.of(3)
    _, state = affine.update(seen((10, 10, 10), machines.times((10, 10, 10)), limits), state)
    assert affine.split(2, limits, state) == (0, 1, 1)


def test_granularity_leaves_the_remainder_to_one_worker():
    split = split_by_shares((1.0, 2.0, 3.0), 100, Limits.of(3, granularity=8))
    assert sum(split) == 100
    assert sorted(b % 8 for b in split) == [0, 0, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Limits.of(3, cap=30).check(100),
            "room for 90 samples a step over 3 workers, the global batch is 100: 10 too many",
        ),
        (
            lambda: Limits.of(2, cap=15, granularity=8).check(17),
            "multiples of granularity=8 leaves room for 16 .* 1 too many",
        ),
        (lambda: Limits.of(2, cap=(8, 8, 8)), "got 3 numbers for 2 workers"),
        (lambda: Limits.of(2, cap=0), "at least 1, got 0"),
        (lambda: Limits.of(2, lower=0), "min_local_batch must be at least 1"),
        (lambda: Limits.of(2, granularity=0), "granularity must be at least 1"),
        (lambda: Limits.of(2, lower=9, cap=8).check(16), "worker 0 has 9 > 8"),
    ],
)
def test_bad_limits(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
