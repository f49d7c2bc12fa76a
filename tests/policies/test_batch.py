"""Batch policies: estimators without bias, tests that settle where theory says, bounds that hold."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.policies.batch import (
    BATCH,
    Augmented,
    Bounds,
    Constant,
    Gradients,
    Growth,
    Hysteresis,
    InnerProduct,
    NoiseScale,
    NormTest,
    Schedule,
    batch_policy,
)
from paceline.policies.batch.inner_product import across, along
from paceline.policies.batch.noise import Averages, unbiased
from paceline.policies.batch.rates import RULES, check_rule, factor
from paceline.types import from_plain, to_plain

BIG = 10**9


def seen_of(total, sizes=(), squares=(), joint=math.nan, inner=(), most=BIG, first=1):
    return Gradients(
        step=0, total=total, most=most, first=first, sizes=sizes, squares=squares, joint=joint, inner=inner
    )


def draw(random, sizes, mean, deviation, *, total=None):
    """Gradients of parts of these sizes: mean + noise of per-sample standard deviations `deviation`."""
    parts = [mean + deviation * random.standard_normal(len(mean)) / math.sqrt(b) for b in sizes]
    joint = sum(b * g for b, g in zip(sizes, parts, strict=True)) / sum(sizes)
    return seen_of(
        total or sum(sizes),
        tuple(map(float, sizes)),
        tuple(float(g @ g) for g in parts),
        float(joint @ joint),
        tuple(float(g @ joint) for g in parts),
    )


@pytest.mark.parametrize("sizes", [(1, 9), (3, 5, 40), (16, 16, 16, 16), (2, 3, 5, 7, 11, 13, 17, 19)])
def test_the_estimator_has_no_bias_for_unequal_parts(sizes):
    """Value a: means within 1 % over many draws."""
    random = np.random.default_rng(0)
    mean = random.standard_normal(50) / 5
    deviation = np.linspace(0.2, 1.2, 50)
    found = np.array([unbiased(draw(random, sizes, mean, deviation)) for _ in range(20000)])
    trace, square = float((deviation**2).sum()), float(mean @ mean)
    assert found[:, 0].mean() == pytest.approx(trace, rel=0.01)
    assert found[:, 1].mean() == pytest.approx(square, rel=0.01)


def test_noise_scale_follows_a_known_one():
    """Within 10 % after averaging, as the noise changes twentyfold, with unequal parts."""
    random = np.random.default_rng(1)
    mean = random.standard_normal(200)
    mean /= np.linalg.norm(mean)
    policy = NoiseScale(decay=0.99)
    state = policy.init()
    for noise in (100.0, 2000.0, 400.0):
        deviation = np.full(200, math.sqrt(noise / 200))
        for _ in range(1500):
            size, state = policy.update(draw(random, (20, 30, 50), mean, deviation), state)
        assert size.noise == pytest.approx(noise, rel=0.1)
        assert size.total == pytest.approx(noise, rel=0.1)


@pytest.mark.parametrize(("eta", "c"), [(0.8, 0.5625), (0.5, 3.0), (0.25, 15.0)])
def test_the_norm_test_settles_at_c_noise_scales(eta, c):
    """Value b: on the mean gradient statistics; a single draw ratchets a little higher."""
    noise, workers = 400.0, 8
    policy = NormTest(eta)
    assert policy.c == pytest.approx(c)
    total, state = 8, policy.init()
    for _ in range(60):  # without sampling noise: q and n at their means
        seen = seen_of(total, (total / workers,) * workers, (1 + workers * noise / total,) * workers, 1 + noise / total)
        size, state = policy.update(seen, state)
        assert total <= size.total <= math.ceil(total / eta**2)
        total = size.total
    assert total == pytest.approx(c * noise, rel=0.01, abs=1)


def test_the_norm_test_ratchets_upwards_on_noisy_statistics():
    random = np.random.default_rng(2)
    mean = random.standard_normal(500)
    mean /= np.linalg.norm(mean)
    deviation = np.full(500, math.sqrt(383 / 500))  # Bn = 383: eta = 0.5 predicts 1149
    policy, total = NormTest(0.5), 64
    state = policy.init()
    for _ in range(400):
        size, state = policy.update(draw(random, (total // 8,) * 8, mean, deviation, total=total), state)
        total = size.total
    assert 1149 < total < 1500


@given(
    st.floats(0.05, 0.95),
    st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1e6)), min_size=2, max_size=8),
    st.floats(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_one_norm_test_never_grows_by_more_than_eta_allows(eta, parts, share):
    """Value c. ||g||^2 lies between 0 and q, by convexity."""
    sizes = tuple(float(b) for b, _ in parts)
    squares = tuple(s for _, s in parts)
    q = math.fsum(b * s for b, s in zip(sizes, squares, strict=True)) / math.fsum(sizes)
    total = int(sum(sizes))
    seen = seen_of(total, sizes, squares, q * share)
    size, _ = NormTest(eta).update(seen, Averages())
    assert total <= size.total <= math.ceil(total / eta**2)
    assert size.total > total or unbiased(seen)[0] <= eta**2 * seen.joint * total * (1 + 1e-9)
    for policy in (InnerProduct(eta), Augmented(eta, eta)):
        inner = dataclasses.replace(seen, most=10**5, inner=tuple(q * share for _ in sizes))
        assert total <= policy.update(inner, Averages())[0].total <= max(total, 10**5)
    kept, _ = Bounds(NormTest(eta), most=total + 3).update(seen, Averages())
    assert total <= kept.total <= total + 3


def test_eta_of_one_never_grows_and_is_refused():
    with pytest.raises(ConfigError, match=r"eta must lie between 0 and 1.*got 1.*eta = 1 would never grow it"):
        NormTest(1)
    for eta in (0, 1.5, -0.1, math.nan, "much", True):
        with pytest.raises(ConfigError, match="eta must lie"):
            NormTest(eta)
    almost = NormTest(1 - 1e-9)
    seen = seen_of(64, (32.0, 32.0), (1e6, 1e6), 1.0)
    assert almost.update(seen, almost.init())[0].total <= 65


def test_the_inner_product_tests_are_those_over_single_samples():
    """Parts of one sample each: the definitions themselves."""
    random = np.random.default_rng(3)
    rows = 0.3 + random.standard_normal((40, 12))
    mean = rows.mean(axis=0)
    seen = seen_of(
        40,
        (1.0,) * 40,
        tuple((rows**2).sum(axis=1)),
        float(mean @ mean),
        tuple(float(v) for v in rows @ mean),
    )
    inner = rows @ mean
    assert along(seen) == pytest.approx(inner.var(ddof=1))
    sideways = rows - np.outer(inner / (mean @ mean), mean)
    assert across(seen) == pytest.approx((sideways**2).sum() / 39)
    assert unbiased(seen)[0] == pytest.approx(rows.var(axis=0, ddof=1).sum())
    theta, nu = 0.2, 0.3
    first = math.ceil(inner.var(ddof=1) / (theta**2 * float(mean @ mean) ** 2))
    second = math.ceil((sideways**2).sum() / 39 / (nu**2 * float(mean @ mean)))
    assert InnerProduct(theta).update(seen, Averages())[0].total == max(40, first)
    assert Augmented(theta, nu).update(seen, Averages())[0].total == max(40, first, second)


def test_wrappers_hold_in():
    class Asks:
        name, needs, at = "asks", "norms", "first"

        def __init__(self, total):
            self.total = total

        def init(self):
            return ()

        def planned(self, step, samples):
            return None

        def update(self, seen, state):
            from paceline.policies.batch import Size

            return Size(self.total, "because"), state

    seen = seen_of(100, most=1000, first=80)

    def ask(wrapper, total, **kwargs):
        return wrapper(Asks(total), **kwargs).update(seen, ())[0]

    assert ask(Growth, 900).total == 200
    assert ask(Growth, 10).total == 50
    assert ask(Growth, 150).total == 150
    assert ask(Hysteresis, 119).total == 100
    assert ask(Hysteresis, 121).total == 121
    assert ask(Hysteresis, 61).total == 100
    assert ask(Hysteresis, 59).total == 59
    assert ask(Bounds, 5000).total == 1000
    assert "data and memory" in ask(Bounds, 5000).reason
    assert ask(Bounds, 5000, most=300).total == 300
    assert "most is 300" in ask(Bounds, 5000, most=300).reason
    assert ask(Bounds, 5, least=32).total == 32
    assert ask(Bounds, 100, most=60).total == 100  # nothing asked for: left alone
    assert ask(Bounds, 70).total == 80  # the batch the run began with
    assert ask(Bounds, 70, least=200).total == 100  # a bound above what there is does not make it grow
    both = Bounds(Hysteresis(Growth(Asks(10**6))), most=170).update(seen, ())[0]
    assert both.total == 170


@pytest.mark.parametrize("name", ["norm-test", "inner-product", "augmented", "noise-scale:patience=1"])
def test_what_tells_nothing_changes_nothing(name):
    policy = batch_policy(name)
    state = policy.init()
    one = seen_of(64, (64.0,), (1.0,), 1.0, (1.0,))
    zero = seen_of(64, (32.0, 32.0), (0.0, 0.0), 0.0, (0.0, 0.0))
    bad = seen_of(64, (32.0, 32.0), (math.nan, 1.0), math.inf, (0.0, math.nan))
    for seen, text in ((one, "at least two workers"), (zero, "gradient is zero"), (bad, "not finite")):
        size, state = policy.update(seen, state)
        assert size.total == 64
        assert text in size.warning
    assert state.skipped == 1
    assert state.noise is None
    assert from_plain(policy.init(), to_plain(state)) == state


def test_schedules():
    policy = batch_policy("schedule:0=64,1000=128,5000=256")
    assert policy == Schedule(((0, 64), (1000, 128), (5000, 256)))
    assert [policy.planned(0, n) for n in (0, 999, 1000, 4999, 10**9)] == [64, 64, 128, 128, 256]
    by_step = batch_policy("schedule:unit=steps,0=8,3=16")
    assert [by_step.planned(step, 10**6) for step in range(5)] == [8, 8, 8, 16, 16]
    for text, message in {
        "schedule:": "begins at 0",
        "schedule:5=3": "begins at 0",
        "schedule:0=0": "at least 1 sample",
        "schedule:0=8,9=4,3=2": "must rise",
        "schedule:0=x": "written begin=batch",
        "schedule:unit=hours,0=8": "'steps' or 'samples'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            batch_policy(text)


def test_policies_by_name():
    assert {batch_policy(name).name for name in BATCH if name != "schedule"} == set(BATCH) - {"schedule"}
    assert batch_policy("constant") == Constant()
    made = batch_policy("noise-scale:c=2,grow=1.5,factor=3,least=16,most=512")
    assert made == Bounds(Growth(Hysteresis(NoiseScale(2), grow=1.5), factor=3), least=16, most=512)
    for text, message in {
        "nois-scale": "did you mean 'noise-scale'",
        "noise-scale:d=3": "setting of noise-scale",
        "norm-test:eta": "name=value",
        "norm-test:least=9,most=8": "least must not exceed most",
        "norm-test:most=0": "at least 1",
        "noise-scale:c=-1": "c must be a positive number",
        "noise-scale:decay=1": "decay",
        "noise-scale:factor=1": "factor must be a number above 1",
        "noise-scale:shrink=2": "shrink must be below 1",
        "augmented:nu=0": "nu must be a positive number",
        "norm-test:needs=inner": "setting of norm-test",
    }.items():
        with pytest.raises(ConfigError, match=message):
            batch_policy(text)


def test_learning_rate_rules():
    assert [factor(rule, 64, 256, 100.0) for rule in RULES] == [
        1.0,
        4.0,
        2.0,
        pytest.approx((1 + 100 / 64) / (1 + 100 / 256)),
    ]
    assert [factor(rule, 64, 64, 100.0) for rule in RULES] == [1.0] * 4
    assert factor("adascale", 64, 256, None) == 1.0
    assert factor("adascale", 64, 256, math.inf) == 4.0
    assert factor("adascale", 64, 256, 0.0) == 1.0
    with pytest.raises(ConfigError, match="learning-rate rule"):
        check_rule("quadratic")
