"""`goodput`: the cost of a step is recovered from what workers tell, and the batch is the best one for it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policies.balance import policy as balance_policy
from paceline.policies.batch import Goodput, Gradients, batch_policy
from paceline.policies.batch.cost import Cost
from paceline.types import Limits, Observation, from_plain, to_plain


def gradients(total, noise, fixed, most=10**6, first=64):
    """Of two halves, with |G|^2 = 1 and exactly this noise scale."""
    half = total / 2
    return Gradients(
        step=0,
        total=total,
        most=most,
        first=first,
        sizes=(half, half),
        squares=(1 + noise / half,) * 2,
        joint=1 + noise / total,
        fixed=fixed,
    )


def window(split, fixed, slope):
    times = tuple(c + a * b for b, c, a in zip(split, fixed, slope, strict=True))
    zero = (0.0,) * len(split)
    return Observation(
        0, 0, False, sum(split), Limits.of(len(split)), tuple(map(float, split)), times, zero, times, times
    )


@settings(deadline=None)
@given(st.floats(10, 1e4), st.floats(10, 1e4))
def test_no_batch_makes_more_progress_per_second(noise, fixed):
    policy, state = Goodput(patience=1), Goodput().init()
    size, _ = policy.update(gradients(64, noise, fixed), state)

    def progress(batch):
        return batch / ((fixed + batch) * (noise + batch))

    assert size.noise == pytest.approx(noise, rel=1e-6)
    assert progress(size.total) >= 0.995 * max(map(progress, np.geomspace(1, 1e5, 300)))


@pytest.mark.parametrize("balance", ["affine", "equal", "dbs"])
def test_the_fixed_cost_of_unlike_workers(balance):
    """What the formula gives for the true lines, from windows at three batches; None before the second one."""
    fixed, slope = np.array([0.05, 0.03, 0.06]), np.array([1e-4, 2e-4, 4e-4])
    policy, limits, exchange = balance_policy(balance), Limits.of(3), 0.012
    state, cost = policy.init(3), Cost.unknown(3)

    def divide(known, total):
        return policy.split(total, limits, known)

    for total in (96, 96, 128, 256, 256):
        split = policy.split(total, limits, state)
        if total == 96:
            assert cost.fixed(total, partial(divide, state)) is None
        seen = window(split, fixed, slope)
        cost = cost.add(seen, exchange)
        _, state = policy.update(seen, state)
        if balance == "equal" and total == 96:
            assert cost.fixed(total, partial(divide, state)) is None

    def slowest(total):
        return (fixed + slope * policy.split(total, limits, state)).max()

    marginal = (slowest(512) - slowest(256)) / 256
    true = (slowest(256) + exchange) / marginal - 256
    assert cost.fixed(256, partial(divide, state)) == pytest.approx(true, rel=1e-6)
    later = cost.fixed(256, partial(divide, state), further_s=0.1)
    assert later == pytest.approx(true + 0.1 / marginal, rel=1e-6)
    assert from_plain(Cost.unknown(3), to_plain(cost)) == cost


def test_a_worker_without_samples_does_not_hide_the_cost():
    cost = Cost.unknown(2)
    for batch in (32, 48, 64):
        cost = cost.add(window((batch, 0), (0.01, 0.0), (1e-3, 0.0)), 0.0)
    assert cost.fixed(64, lambda n: (n, 0)) == pytest.approx(10, rel=1e-6)


def test_an_unknown_cost_is_explored_and_bounds_hold():
    policy = batch_policy("goodput:patience=1,most=200")
    size, _ = policy.update(gradients(100, 50.0, None), policy.init())
    assert size.total == 125
    assert "costs before its first" in size.reason
    size, _ = policy.update(gradients(180, 50.0, None, first=100), policy.init())
    assert size.total == 200
    size, _ = policy.update(gradients(100, 400.0, 900.0), policy.init())
    assert size.total == 200
    assert "600 make most progress" in size.reason
    size, _ = policy.update(gradients(100, 400.0, 0.0, first=1), policy.init())
    assert size.total == 50  # a step that costs its samples alone: as small as one decision may make it


def test_no_signal_asks_for_all_there_is_as_noise_scale_does():
    seen = Gradients(step=0, total=64, most=500, sizes=(32.0, 32.0), squares=(3.0, 3.0), joint=1.0, fixed=100.0)
    size, _ = Goodput(patience=1).update(seen, Goodput().init())
    assert size.total == 500


def test_exploring_ends_where_it_finds_nothing():
    """A cost that stays unknown must not drive the batch to its bound."""
    policy = batch_policy("goodput:patience=1")
    total = 64
    for _ in range(30):
        seen = gradients(total, 50.0, None, first=64)
        total = policy.update(seen, policy.init())[0].total
    assert total <= 160


def test_a_worker_held_at_a_bound_does_not_hide_the_cost():
    cost = Cost.unknown(2)
    for batch in (32, 48, 64):
        cost = cost.add(window((batch, 8), (0.01, 0.001), (1e-3, 1e-3)), None)
    assert cost.fixed(72, lambda n: (n - 8, 8)) == pytest.approx(10 - 8, rel=1e-6)
    assert cost.fixed(72, lambda n: (64, 8)) is None  # nobody's share grows
