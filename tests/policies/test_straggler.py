"""Who has fallen behind: found, in the right phase, once; and nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.policies.balance import policy as balance
from paceline.policies.straggler import Watch
from paceline.types import Limits, Observation, from_plain, to_plain

FIXED, SLOPE = np.array([0.02, 0.05, 0.01]), np.array([1e-3, 5e-4, 2e-3])


def play(windows, change, seed=0, splits=((30, 60, 20),), noise=0.03, watch=None):
    """Windows of four steps; `change(window, phases, exchange)` -> the same, disturbed."""
    random = np.random.default_rng(seed)
    watch = watch or Watch()
    past, found = watch.init(3), []
    for window in range(windows):
        b = np.array(splits[window % len(splits)], float)
        phases = np.stack([0.1 * SLOPE * b, FIXED + 0.9 * SLOPE * b, np.full(3, 0.002)], axis=1)
        phases = phases * (1 + noise * random.standard_normal((3, 1)))
        phases, exchange = change(window, phases, 0.01 * (1 + noise * random.standard_normal()))
        busy = phases.sum(axis=1)
        behind, past = watch.update(4 * window, b, busy, noise * busy / 2, phases, exchange, past)
        assert from_plain(watch.init(3), to_plain(past)) == past
        found += [(window, one) for one in behind]
    return found


def steady(window, phases, exchange):
    return phases, exchange


@pytest.mark.parametrize("seed", range(2))
def test_nobody_is_behind_on_noisy_steady_workers(seed):
    many = tuple(tuple(row) for row in np.random.default_rng(seed).integers(10, 90, (200, 3)))
    assert play(1000, steady, seed) == []
    assert play(1000, steady, seed, splits=many) == []


@pytest.mark.parametrize(("phase", "column"), [("data", 0), ("compute", 1)])
def test_a_worker_that_slows_down_is_named_once(phase, column):
    def slower(window, phases, exchange):
        if window >= 40:
            phases[1, column] += 0.6 * phases[1].sum()
        return phases, exchange

    ((window, behind),) = play(300, slower)
    assert window == 42
    assert (behind.worker, behind.phase, behind.since) == (1, phase, 4 * 40)
    assert behind.ratio == pytest.approx(1.6, rel=0.1)
    assert 0.9 < behind.confidence < 1
    assert behind.text.startswith(
        f"worker 1 takes {behind.ratio:.1f} times as long as before since step 160, for {phase}"
    )


@pytest.mark.parametrize("rate", [1.005, 1.01])
def test_a_worker_that_creeps_is_named_too(rate):
    def slower(window, phases, exchange):
        phases[1, 1] *= rate ** max(0, window - 40)
        return phases, exchange

    found = play(160, slower)
    assert found
    assert {(one.worker, one.phase) for _, one in found} == {(1, "compute")}
    window, first = found[0]
    assert 1.25 < first.ratio < 1.6
    assert 4 * 40 - 120 < first.since < 4 * window
    assert len(found) < 10


@pytest.mark.parametrize("rate", [1.005, 1.01])
def test_a_worker_that_creeps_is_named_although_its_share_follows(rate):
    """With `affine` its time stays about the same, and its batch shrinks."""
    random, limits, watch, policy = np.random.default_rng(0), Limits.of(3), Watch(), balance("affine")
    past, state, found = watch.init(3), policy.init(3), []
    for window in range(260):
        b = np.array(policy.split(120, limits, state), float)
        factor = np.array([1.0, rate ** max(0, window - 60), 1.0])
        busy = (FIXED + SLOPE * b) * factor * (1 + 0.01 * random.standard_normal(3))
        phases = np.stack([0.0 * busy, busy, 0.0 * busy], axis=1)
        behind, past = watch.update(4 * window, b, busy, 0.005 * busy, phases, 0.01, past)
        found += behind
        times = tuple(busy)
        seen = Observation(4 * window + 3, 0, False, 120, limits, tuple(b), times, tuple(0.005 * busy), times, times, 4)
        _, state = policy.update(seen, state)
    assert found
    assert {(one.worker, one.phase) for one in found} == {(1, "compute")}


def test_two_falls_that_are_each_too_small_are_one():
    def slower(window, phases, exchange):
        phases[1, 1] *= 1.2 ** ((window >= 100) + (window >= 300))
        return phases, exchange

    ((window, behind),) = play(500, slower)
    assert 300 < window < 400
    assert (behind.worker, behind.phase) == (1, "compute")


def test_a_smaller_batch_is_not_a_fall():
    """Equal shares first, then a tenth: fixed costs make a sample dearer, and one size had told no slope."""
    splits = ((60, 60, 60),) * 20 + ((6, 90, 84),) * 20
    assert play(40, steady, splits=splits) == []


def test_single_bad_windows_are_passed_over():
    def hiccup(window, phases, exchange):
        return (phases * 3 if window % 10 == 5 else phases), exchange

    assert play(200, hiccup) == []


def test_a_slow_exchange_is_nobodys_fault():
    def slower(window, phases, exchange):
        return phases, exchange * (3 if window >= 30 else 1)

    ((_, behind),) = play(100, slower)
    assert (behind.worker, behind.phase, behind.since) == (-1, "exchange", 120)

    def tiny(window, phases, exchange):
        return phases, 1e-4 * (3 if window >= 30 else 1)

    assert play(100, tiny) == []  # three times next to nothing


def test_falling_twice_is_told_twice():
    def twice(window, phases, exchange):
        return phases * np.array([[1], [1], [2.0 if window >= 80 else 1.5 if window >= 40 else 1]]), exchange

    found = play(200, twice)
    assert [one.worker for _, one in found] == [2, 2]


def balanced(windows, slow_from, factor, seed, jitter=0.03, equal=False):
    """The same under `affine`, which takes samples away from a worker as soon as it slows down."""
    random, policy, limits = np.random.default_rng(seed), balance("affine"), Limits.of(3)
    fixed, slope = (np.full(3, 0.02), np.full(3, 1e-3)) if equal else (FIXED, SLOPE)
    state, watch = policy.init(3), Watch()
    past, found = watch.init(3), []
    for window in range(windows):
        b = np.array(policy.split(120, limits, state), float)
        speed = np.array([1.0, factor if window >= slow_from else 1.0, 1.0])
        compute = (fixed + slope * b) * speed * (1 + jitter * random.standard_normal(3))
        phases = np.stack([np.full(3, 1e-4), compute, np.full(3, 0.002)], axis=1)
        busy, step = phases.sum(axis=1), 4 * window + 3
        seen = Observation(
            step, 0, False, 120, limits, tuple(b), tuple(busy), tuple(jitter * busy / 2), tuple(busy), tuple(compute), 4
        )
        behind, past = watch.update(step - 3, b, busy, jitter * busy / 2, phases, 0.01, past)
        _, state = policy.update(seen, state)
        found += [(window, one) for one in behind]
    return found


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("slow_from", [15, 100])
@pytest.mark.parametrize("factor", [1.6, 3.0])
def test_balancing_does_not_hide_a_worker_that_slows_down(factor, slow_from, equal):
    found = balanced(slow_from + 60, slow_from, factor, seed=slow_from, equal=equal)
    assert [(one.worker, one.phase, one.since) for _, one in found] == [(1, "compute", 4 * slow_from)]
    assert found[0][0] <= slow_from + 6


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("jitter", [0.02, 0.1, 0.3])
def test_balancing_and_jitter_alone_make_no_straggler(seed, jitter):
    assert balanced(400, 10**6, 1.0, seed, jitter, equal=seed % 2 == 0) == []


def test_an_exchange_that_always_varies_is_not_a_fall():
    random = np.random.default_rng(0)

    def varies(window, phases, exchange):
        return phases, 0.05 * random.lognormal(0, 0.5)

    assert play(600, varies) == []
