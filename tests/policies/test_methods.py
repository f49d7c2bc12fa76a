"""What each method does: the values it must reproduce."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from paceline.policies.balance import DBS, DP, EDP, Affine, Bounds, DeadBand, EveryNSteps, Smooth, policy
from paceline.policies.balance.fit import Fit, Lines
from paceline.policies.balance.window import observe
from paceline.types import Limits
from tests.policies.machines import Machines, plans, seen

DELAYED = Machines((0.0, 0.2), (0.2195 / 128, 0.2261 / 128))  # a worker that sleeps 0.2 s per batch
FOUR_CARDS = Machines((0.0059, 0.0072, 0.0083, 0.0510), (0.000593, 0.000581, 0.000602, 0.002671))


def test_the_published_rule_without_rounding():
    """The rule's own iteration: slowest time per plan, converging by the fixed share of the step."""
    shares, slowest = [0.5, 0.5], []
    for _ in range(40):
        times = DELAYED.times(tuple(256 * p for p in shares))
        slowest.append(max(times))
        rates = [p / t for p, t in zip(shares, times, strict=True)]
        shares = [rate / sum(rates) for rate in rates]
    assert [round(t, 4) for t in slowest[:5]] == [0.4261, 0.3537, 0.3342, 0.3268, 0.3237]
    assert slowest[-1] == pytest.approx(0.3213, abs=5e-5)


@pytest.mark.parametrize("rule", [DBS, EDP, DP])
def test_dbs_and_its_kin_follow_the_rule_to_within_rounding(rule):
    used = plans(rule, DELAYED, 256, 8)
    slowest = [max(DELAYED.times(split)) for split in used]
    assert slowest[:3] == pytest.approx([0.4261, 0.3537, 0.3342], abs=5e-4)
    assert used[-1] == (187, 69)
    assert used[2] != (187, 69)  # not there by the third plan


def test_affine_is_there_by_its_third_plan():
    used = plans(policy("affine"), DELAYED, 256, 4)
    assert used[2:] == [(187, 69), (187, 69)]
    assert max(DELAYED.times(used[2])) == pytest.approx(0.322, abs=5e-4)


def test_four_unlike_cards():
    assert max(FOUR_CARDS.times((128,) * 4)) == pytest.approx(0.3929, abs=5e-5)
    affine = plans(policy("affine"), FOUR_CARDS, 512, 4)
    assert affine[2:] == [(166, 167, 159, 20)] * 2
    assert max(FOUR_CARDS.times(affine[2])) == pytest.approx(0.1044, abs=5e-5)
    rule = plans(DBS, FOUR_CARDS, 512, 9)
    reached = next(i for i, split in enumerate(rule) if max(FOUR_CARDS.times(split)) < 0.1045)
    assert 4 <= reached <= 7


def test_the_three_one_layout_gains_one_and_a_half():
    """Three workers share one card, the fourth has its own (DBS, section 4)."""
    shared = Machines((0.0,) * 4, (0.003, 0.003, 0.003, 0.001))
    before, after = (max(shared.times(split)) for split in (plans(DBS, shared, 512, 2)))
    assert before / after == pytest.approx(1.5, rel=0.01)


def test_the_rule_acts_once_per_epoch():
    limits, state = Limits.of(2), DBS.init(2)
    for step in range(5):
        decision, state = DBS.update(seen((64, 64), (0.1, 0.3), limits, step, ends_epoch=False, epoch=0), state)
        assert decision.split == (64, 64)
    decision, state = DBS.update(seen((64, 64), (0.1, 0.3), limits, 6, epoch=0), state)
    assert decision.split == (96, 32)


def test_dbs_counts_the_loop_and_edp_only_compute():
    limits = Limits.of(2)
    slow_data = seen((64, 64), (0.1, 0.3), limits, compute_s=(0.1, 0.1))
    assert DBS.update(slow_data, DBS.init(2))[0].split == (96, 32)
    assert EDP.update(slow_data, EDP.init(2))[0].split == (64, 64)


def test_affine_follows_a_worker_that_slows_threefold():
    limits, chosen = Limits.of(4), policy("affine")
    machines = Machines((0.02,) * 4, (0.006, 0.003, 0.002, 0.0015))
    slowed = Machines((0.02, 0.02, 0.02, 0.06), (0.006, 0.003, 0.002, 0.0045))
    state = chosen.init(4)
    split = chosen.split(128, limits, state)
    for step in range(6):
        decision, state = chosen.update(seen(split, machines.times(split), limits, step), state)
        split = decision.split
    best = max(slowed.times(plans(Affine(), slowed, 128, 6)[-1]))
    for step in range(6, 8):  # two windows: eight steps
        decision, state = chosen.update(seen(split, slowed.times(split), limits, step), state)
        split = decision.split
    assert max(slowed.times(split)) <= 1.05 * best


def settled(chosen, machines, total, limits, windows=8):
    """What a policy knows, and its split, after some windows."""
    state = chosen.init(len(machines.fixed))
    split = chosen.split(total, limits, state)
    for step in range(windows):
        decision, state = chosen.update(seen(split, machines.times(split), limits, step), state)
        split = decision.split
    return state, split


@pytest.mark.parametrize("extra", [0.02, 0.06, 0.2])
@pytest.mark.parametrize("who", [(0,), (0, 2)])
def test_affine_does_not_go_too_far_when_a_disturbance_ends(extra, who):
    """A fixed cost that vanishes leaves one point: it must not be read as a worker for whom samples cost nothing."""
    limits, chosen = Limits.of(4), policy("affine")
    machines = Machines((0.012,) * 4, (0.002,) * 4)
    disturbed = Machines(tuple(0.012 + extra * (rank in who) for rank in range(4)), (0.002,) * 4)
    state, split = settled(chosen, disturbed, 128, limits)
    best = 0.012 + 0.002 * 32
    before = max(machines.times(split))
    for step in range(8, 11):
        decision, state = chosen.update(seen(split, machines.times(split), limits, step), state)
        split = decision.split
        assert max(machines.times(split)) <= before, split
    assert max(machines.times(split)) <= 1.05 * best


def test_noise_alone_moves_nothing_much_on_equal_workers():
    generator = random.Random(5)
    limits, chosen = Limits.of(4), policy("affine")
    state, split, worst = chosen.init(4), (64,) * 4, 1.0
    for step in range(200):
        times = tuple((0.05 + 0.001 * b) * generator.gauss(1, 0.01) for b in split)
        noise = tuple(0.01 * t for t in times)
        decision, state = chosen.update(seen(split, times, limits, step, noise_s=noise), state)
        split = decision.split
        worst = max(worst, max(0.05 + 0.001 * b for b in split) / (0.05 + 0.001 * 64))
    assert worst < 1.02


def test_fit_shrinks_the_slope_when_noise_hides_it():
    lines = Lines.unknown(1)
    fit = Fit()
    for b, t in ((100.0, 0.100), (101.0, 0.1045)):  # a step of 1 % in b, noise of 3 % in t
        lines = fit.update(lines, np.array([b]), np.array([t]), np.array([0.003]))
    assert 0.0005 < lines.slope_s[0] < 0.0015  # least squares alone would say 0.0045
    assert lines.fixed_s[0] >= 0


def test_fit_keeps_the_fixed_cost_when_a_worker_slows():
    lines, fit = Lines.unknown(1), Fit()
    none = np.zeros(1)
    for b in (100.0, 60.0, 80.0):
        lines = fit.update(lines, np.array([b]), np.array([0.05 + 0.001 * b]), none)
    assert lines.fixed_s[0] == pytest.approx(0.05)
    lines = fit.update(lines, np.array([80.0]), np.array([0.05 + 0.003 * 80]), none)
    assert lines.fixed_s[0] == pytest.approx(0.05)
    assert lines.slope_s[0] == pytest.approx(0.003)


def test_fit_forgets_and_follows_a_bend():
    lines, fit = Lines.unknown(1), Fit()
    none = np.zeros(1)
    for b in (50.0, 60.0, 70.0, 80.0):
        lines = fit.update(lines, np.array([b]), np.array([0.001 * b]), none)
    for b in (100.0, 110.0, 105.0, 108.0, 102.0, 107.0, 104.0, 109.0, 103.0, 106.0) * 3:  # memory spills past 80
        lines = fit.update(lines, np.array([b]), np.array([0.08 + 0.004 * (b - 80)]), none)
    predicted = lines.fixed_s[0] + lines.slope_s[0] * 105
    assert predicted == pytest.approx(0.08 + 0.004 * 25, rel=0.02)


def test_a_worker_that_tells_nothing_keeps_its_line():
    affine, limits = Affine(), Limits.of(2)
    _, state = affine.update(seen((50, 50), (0.1, 0.2), limits), affine.init(2))
    _, later = affine.update(seen((50, 50), (0.1, 0.2), limits, samples=(50.0, 0.0), busy_s=(0.1, 0.0)), state)
    assert later.slope_s[1] == state.slope_s[1]
    assert later.weight[1] == state.weight[1]


def test_dead_band_keeps_the_plan_and_says_so():
    limits, chosen = Limits.of(2), DeadBand(Affine(), gain=0.10)
    decision, state = chosen.update(seen((50, 50), (0.100, 0.108), limits), chosen.init(2))
    assert decision.split == (50, 50)
    assert decision.reason.startswith("kept: a change would gain")
    decision, state = chosen.update(seen((50, 50), (0.100, 0.2), limits, 1), state)
    assert decision.split == (67, 33)
    assert decision.reason.startswith("gains")


def test_every_n_steps_waits():
    limits, chosen = Limits.of(2), EveryNSteps(Affine(), 10)
    state, changed = chosen.init(2), []
    for step in range(0, 40, 4):
        times = (0.1, 0.1 + 0.01 * step)
        split = chosen.split(100, limits, state)
        decision, state = chosen.update(seen(split, times, limits, step), state)
        if decision.split != split:
            changed.append(step)
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(changed))
    assert len(changed) >= 2


def test_smoothing_damps_a_single_slow_window():
    limits = Limits.of(2)

    def after_a_blip(chosen):
        state = chosen.init(2)
        for step in range(5):
            _, state = chosen.update(seen((50, 50), (0.1, 0.1), limits, step), state)
        decision, _ = chosen.update(seen((50, 50), (0.1, 0.3), limits, 5), state)
        return decision.split[1]

    assert after_a_blip(Affine()) < after_a_blip(Smooth(Affine(), 0.3)) < 50


def test_bounds_tighten():
    limits, chosen = Limits.of(2, cap=80), Bounds(Affine(), lower=20, cap=(60, None))
    decision, _ = chosen.update(seen((50, 50), (0.001, 10.0), limits), chosen.init(2))
    assert decision.split == (60, 40)


def row(samples, compute, data=0.0, optimizer=0.0, comm=0.0):
    return [samples, data, compute, comm, optimizer]


def test_a_window_takes_the_latest_plan_and_ignores_an_outlier():
    rows = np.array([[row(8, 9.0), row(4, 1.0, 0.5, 0.25, 7.0), row(4, 50.0), row(4, 1.0, 0.5, 0.25)]])
    out = observe(rows, step=3, epoch=0, ends_epoch=False, total=4, limits=Limits.of(1))
    assert out.samples == (4.0,)
    assert out.busy_s == (1.75,)
    assert out.compute_s[0] == pytest.approx(61 / 4)
    assert out.noise_s == (0.0,)


def test_a_window_knows_who_told_nothing():
    nothing = [float("nan")] * 5
    rows = np.array([[row(4, 1.0), row(4, 1.1), row(4, 1.2)], [nothing] * 3, [row(0, 1.0), nothing, nothing]])
    out = observe(rows, step=2, epoch=0, ends_epoch=True, total=12, limits=Limits.of(3))
    assert out.samples == (4.0, 0.0, 0.0)
    assert out.busy_s[0] == pytest.approx(1.1)
    assert out.noise_s[0] > 0
    assert out.num_steps == 3
