"""Sync policies as state machines: moments in, actions out."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, NonFiniteError
from paceline.policies.sync import (
    QSR,
    SYNC,
    Daso,
    Diloco,
    Fixed,
    Hide,
    Local,
    Moment,
    Overlap,
    PostLocal,
    Round,
    SyncState,
    Terms,
    sync_policy,
)
from paceline.policies.sync.outliers import drift, weigh
from paceline.policies.sync.steps import guarded
from paceline.types import from_plain, to_plain


def play(policy, steps, epoch_steps=10**9, **seen):
    """The actions of `steps` steps."""
    _, state = policy.init()
    actions = []
    for step in range(1, steps + 1):
        epoch, within = divmod(step - 1, epoch_steps)
        action, state = policy.update(
            Moment(step=step, epoch=epoch, ends_epoch=within == epoch_steps - 1, **{"lr": 0.1, **seen}), state
        )
        actions.append(action)
    return actions, state


# ------------------------------------------------------------------------------------------------------- daso as a table
# Value e: plateau events in, (B, W) out.
@pytest.mark.parametrize(
    ("b_max", "table"),
    [
        (4, [(4, 1), (2, 1), (1, 1), (4, 1), (2, 1)]),
        (8, [(8, 2), (4, 1), (2, 1), (1, 1), (8, 2), (4, 1)]),
        (1, [(1, 1), (1, 1)]),
        (16, [(16, 4), (8, 3), (4, 2), (2, 1), (1, 1), (16, 4)]),
    ],
)
def test_daso_plateaus(b_max, table):
    policy = Daso(b_max=b_max, warm_up=0)
    scope, state = policy.init()
    assert scope == "node"
    seen = [(state.every, state.delay)]
    epoch = 0
    _, state = policy.update(Moment(step=1, epoch=epoch, ends_epoch=True, loss=1.0), state)  # the first loss is a gain
    while len(seen) < len(table):
        for bad in range(3):  # the third epoch without 5 % gain is the plateau
            epoch += 1
            assert (state.every, state.delay) == seen[-1], f"changed after {bad} bad epochs"
            action, state = policy.update(Moment(step=2, epoch=epoch, ends_epoch=True, loss=0.96), state)
        seen.append((state.every, state.delay))
        assert "stalls" in action.reason
    assert seen == table


def test_daso_gains_of_five_percent_are_no_plateau():
    policy = Daso(warm_up=0)
    _, state = policy.init()
    loss = 1.0
    for epoch in range(30):
        _, state = policy.update(Moment(step=epoch + 1, epoch=epoch, ends_epoch=True, loss=loss), state)
        loss *= 0.94
    assert (state.every, state.delay, state.bad) == (4, 1, 0)


@pytest.mark.parametrize(
    ("warm_up", "cool_down", "epochs", "scopes"),
    [
        (1, 1, 4, ["all", "node", "node", "all"]),
        (0, 0, 2, ["node", "node"]),
        (0, 2, 3, ["node", "all", "all"]),
        (2, 0, 3, ["all", "all", "node"]),
        (1, 9, None, ["all", "node", "node"]),
    ],
)
def test_daso_phases(warm_up, cool_down, epochs, scopes):
    policy = Daso(warm_up=warm_up, cool_down=cool_down, epochs=epochs)
    scope, state = policy.init()
    seen = []
    for epoch in range(len(scopes)):
        seen.append(scope)
        for step in range(10):
            action, state = policy.update(Moment(step=10 * epoch + step + 1, epoch=epoch, ends_epoch=step == 9), state)
            if step < 9:
                assert action.scope == scope
        if scope == "node":  # every epoch of rounds ends agreed
            assert action.send
            assert action.wait
            assert action.agree
        scope = action.scope
    assert seen == scopes


def test_daso_sends_every_b_and_takes_in_w_later():
    actions, _ = play(Daso(b_max=8, warm_up=0), 40)
    sent = [step for step, action in enumerate(actions, 1) if action.send]
    merged = [step for step, action in enumerate(actions, 1) if action.merge]
    assert sent == [8, 16, 24, 32, 40]
    assert merged == [10, 18, 26, 34]


# ---------------------------------------------------------------------------------------------------------- the shared cycle
@given(h=st.integers(1, 12), w=st.integers(0, 12), epoch=st.integers(1, 40), steps=st.integers(1, 120))
def test_every_exchange_is_taken_in_before_the_next_one(h, w, epoch, steps):
    if w > h:
        with pytest.raises(ConfigError, match="must not exceed H"):
            Overlap(steps=Fixed(h), delay=w)
        return
    actions, _ = play(Overlap(steps=Fixed(h), delay=w), steps, epoch)
    under_way = None
    since = 0
    for step, action in enumerate(actions, 1):
        since += 1
        ends = step % epoch == 0
        if action.merge:
            assert under_way is not None
            assert step - under_way == w or ends or action.send
            under_way = None
        if under_way is not None:
            assert step - under_way < max(1, w)
        assert action.send == (since == h or ends)
        if action.send:
            assert under_way is None, "what is pending is taken in first"
            assert action.wait == (w == 0 or ends)
            under_way = None if action.wait else step
            since = 0


def test_blocking_methods_wait_for_every_exchange():
    for name in ("local", "hierarchical"):
        actions, _ = play(sync_policy(f"{name}:h=5"), 23, 23)
        assert [step for step, action in enumerate(actions, 1) if action.send] == [5, 10, 15, 20, 23]
        assert all(action.wait for action in actions if action.send)
        assert {action.scope for action in actions} == {"own" if name == "local" else "node"}


def test_h_of_one_without_delay_is_the_gradient_sum():
    scope, _ = Local(Fixed(1)).init()
    assert scope == "all"
    assert not any(action.send for action in play(Local(Fixed(1)), 20, 5)[0])


def test_fragments_go_round():
    policy = Diloco(h=12, delay=2, terms=Terms(fragments=3, outer_lr=0.7, outer_momentum=0.9))
    actions, _ = play(policy, 30, 30)
    sent = [(step, action.fragment) for step, action in enumerate(actions, 1) if action.send]
    assert sent == [(4, 0), (8, 1), (12, 2), (16, 0), (20, 1), (24, 2), (28, 0), (30, -1)]
    merged = [step for step, action in enumerate(actions, 1) if action.merge]
    assert merged == [6, 10, 14, 18, 22, 26, 30]


def test_post_local_switches_at_a_step_or_at_a_fall_of_the_learning_rate():
    actions, _ = play(PostLocal(after=10, steps=Fixed(4)), 20, 100)
    assert [action.scope for action in actions] == ["all"] * 9 + ["own"] * 11
    assert [step for step, action in enumerate(actions, 1) if action.send] == [14, 18]
    policy = PostLocal()
    scope, state = policy.init()
    assert scope == "all"
    for step, lr in enumerate([0.1, 0.1, 0.09, 0.01, 0.01], 1):
        action, state = policy.update(Moment(step=step, lr=lr), state)
        assert action.scope == ("own" if step >= 4 else "all")
    assert PostLocal(after=0).init()[0] == "own"


def test_warm_up_of_overlap():
    actions, _ = play(Overlap(steps=Fixed(2), delay=1, warm_up=5), 12)
    assert [action.scope for action in actions] == ["all"] * 4 + ["node"] * 8
    assert [step for step, action in enumerate(actions, 1) if action.send] == [7, 9, 11]


# ---------------------------------------------------------------------------------------------------------- how many steps
def test_qsr_values():
    rule = QSR(base=2, alpha=0.1)
    assert [rule.next(Moment(step=1, lr=lr), 2)[0] for lr in (0.1, 0.05, 0.02, 0.01)] == [2, 4, 25, 100]
    assert rule.next(Moment(step=1, lr=0.0), 2)[0] == rule.most


@given(st.floats(1e-4, 10), st.floats(1e-4, 10), st.integers(1, 64))
def test_the_cost_model_takes_the_smallest_h_that_hides_the_transfer(step_s, transfer_s, now):
    rule = Hide(margin=1.2)
    h, _ = rule.next(Moment(step=1, round=Round(step_s, transfer_s, 0.0)), now)
    assert rule.least <= h <= rule.most
    if h < rule.most:
        assert h * step_s >= 1.2 * transfer_s * (1 - 1e-12) or h == now
    if h > rule.least and h != now:
        assert (h - 1) * step_s < 1.2 * transfer_s


def test_the_cost_model_reaches_the_policy():
    policy = Overlap()
    _, state = policy.init()
    told = Round(step_s=0.1, transfer_s=0.55, drift=0.0)
    for step in range(1, 40):
        action, state = policy.update(Moment(step=step, round=told), state)
        if action.reason:
            assert "transfer takes 550 ms, a step 100 ms: H=7" in action.reason
    assert (state.every, state.delay) == (7, 7)


def test_the_drift_guard_shortens_h_and_gives_it_back():
    state = SyncState()
    seen = Moment(step=1, round=Round(0.1, 0.1, drift=9.0))
    h, shrink, reason = guarded(8, seen, state, 4.0)
    assert (h, shrink) == (4, 2)
    assert "drift 9 is over 4" in reason
    for _ in range(10):
        h, shrink, _ = guarded(8, seen, dataclasses.replace(state, shrink=shrink), 4.0)
    assert (h, shrink) == (1, 8)
    calm = Moment(step=1, round=Round(0.1, 0.1, drift=0.2))
    for _ in range(3):
        h, shrink, _ = guarded(8, calm, dataclasses.replace(state, shrink=shrink), 4.0)
    assert (h, shrink) == (8, 1)
    assert guarded(8, seen, state, 0.0)[:2] == (8, 1)


# -------------------------------------------------------------------------------------------------------------- who counts
@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0.5, 2.0)), min_size=1, max_size=9))
def test_weights_follow_samples(replicas):
    samples, lengths = [count for count, _ in replicas], [length for _, length in replicas]
    weights, out, reason = weigh(samples, lengths, 10.0)
    assert out == ()
    assert reason == ""
    assert math.fsum(weights) == pytest.approx(1.0)
    if sum(samples):
        assert weights == pytest.approx([count / sum(samples) for count in samples])


def test_the_odd_ones_are_left_out():
    assert weigh([1, 1, 2], [1.0, math.inf, 1.0], 10.0)[:2] == ((1 / 3, 0.0, 2 / 3), (1,))
    weights, out, reason = weigh([1, 1, 1, 1], [1.0, 1.2, 100.0, 0.9], 10.0)
    assert weights == pytest.approx((1 / 3, 1 / 3, 0.0, 1 / 3))
    assert out == (2,)
    assert "100 times" in reason
    assert weigh([5, 0], [1.0, 0.0], 10.0)[1] == (), "an idle replica is no measure"
    assert weigh([5, 5], [0.0, 0.0], 10.0)[1] == ()
    with pytest.raises(NonFiniteError, match="every replica"):
        weigh([1, 1], [math.nan, math.nan], 10.0)


def test_drift_of_what_we_know():
    assert drift([0.5, 0.5], [1.0, 1.0], 1.0) == 0.0  # the same change
    assert drift([0.5, 0.5], [1.0, 1.0], math.sqrt(0.5)) == pytest.approx(1.0)  # at right angles
    assert drift([0.5, 0.5], [1.0, 1.0], 0.0) == math.inf  # against each other
    assert drift([0.25] * 4, [1.0] * 4, 0.5) == pytest.approx(1.0)  # four at right angles
    assert drift([1.0, 0.0], [1.0, 9.0], 1.0) == 0.0


# --------------------------------------------------------------------------------------------------------------- by name
def test_names_and_settings():
    for name in SYNC:
        assert sync_policy(name).name == name
    policy = sync_policy("overlap:h=8,delay=2,compress=int8,level=worker,drift_limit=0,settle=false")
    assert policy == Overlap(Fixed(8), 2, Terms(level="worker", compress="int8"), 0, False)
    assert sync_policy("diloco:h=10,fragments=2").terms == Terms(outer_lr=0.7, outer_momentum=0.9, fragments=2)
    assert sync_policy("local:steps=qsr").steps == QSR()
    assert sync_policy("daso:b_max=8,epochs=20").epochs == 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("overlp", "did you mean 'overlap'"),
        ("overlap:h=0", "H must be a whole number, at least 1; got 0"),
        ("overlap:h=2,delay=3", "delay (W) must not exceed H"),
        ("overlap:hh=3", "unknown setting of overlap 'hh'"),
        ("overlap:h", "written name=value"),
        ("overlap:compress=int4", "compress must be one of none, bf16, int8; got 'int4'"),
        ("overlap:optimizer_state=average", "needs an exchange that is waited for"),
        ("overlap:steps=magic", "steps must be 'hide' or 'qsr'"),
        ("daso:b_max=0", "b_max (B) must be a whole number, at least 1"),
        ("daso:epochs=5", "must fit into the run: 4 + 4 epochs of 5"),
        ("daso:level=worker", "sync='local'"),
        ("daso:compress=bf16", "would be lost: use sync='overlap:compress=bf16'"),
        ("daso:optimizer_state=average", "needs exchanges that are waited for"),
        ("diloco:h=4,fragments=8", "fragments must not exceed H"),
        ("diloco:h=8,fragments=4,delay=3", "must not exceed H / fragments"),
        ("diloco:outer_momentum=1.0", "outer_momentum below 1"),
        ("post-local:drop=2", "drop must be between 0 and 1"),
    ],
)
def test_bad_settings(name, message):
    with pytest.raises(ConfigError) as error:
        sync_policy(name)
    assert message in str(error.value)


def test_states_survive_json():
    import json

    for name in SYNC:
        _, state = sync_policy(name).init()
        assert from_plain(SyncState(), json.loads(json.dumps(to_plain(state)))) == state
