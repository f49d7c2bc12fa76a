from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.balance import Fixed
from paceline.runtime.order import Shuffled
from paceline.runtime.plans import Plan, PlanBook
from paceline.runtime.sampler import Cursor, PlanSampler
from paceline.types import Limits


def samplers(length, batch, size, cut, drop_last=False, seed=0, cursor=None):
    made = []
    for rank in range(size):
        sampler = PlanSampler(Shuffled(length, seed), batch, rank=rank, cut=cut, drop_last=drop_last)
        sampler.cursor = cursor or Cursor()
        made.append(sampler)
    return made


def cut_by(weights):
    """A different split at every step, drawn from the given weights."""

    def cut(step, total):
        shares = weights[step % len(weights)]
        limits = Limits.of(len(shares))
        return Fixed(shares).split(total, limits, None)

    return cut


@st.composite
def runs(draw):
    size = draw(st.integers(1, 5))
    share = st.lists(st.floats(0.05, 1.0), min_size=size, max_size=size).map(tuple)
    return size, draw(st.lists(share, min_size=1, max_size=6))


@given(st.integers(1, 300), st.integers(1, 80), runs(), st.integers(0, 4))
def test_each_sample_exactly_once_through_every_replan(length, batch, run, epoch):
    size, weights = run
    ranks = samplers(length, batch, size, cut_by(weights), cursor=Cursor(epoch=epoch, step=epoch * 7))
    parts = [list(sampler) for sampler in ranks]
    assert {len(part) for part in parts} == {-(-length // batch)}  # the same number of steps everywhere
    used = []
    for step in range(len(parts[0])):
        total = min(batch, length - step * batch)
        split = cut_by(weights)(epoch * 7 + step, total)
        taken = [part[step] if b else [] for part, b in zip(parts, split, strict=True)]
        assert [len(one) for one in taken] == list(split)
        assert all(part[step] for part in parts)  # an idle worker has a ghost to compute on
        used += [index for one in taken for index in one]
    assert used == Shuffled(length, 0).indices(epoch, 0, length)  # the global sequence, whatever the split


@given(st.integers(2, 200), st.integers(1, 40), runs(), runs(), st.data())
def test_resume_on_another_number_of_workers_takes_exactly_what_was_left(length, batch, before, after, data):
    steps = -(-length // batch)
    stop = data.draw(st.integers(0, steps - 1))
    first = [list(sampler) for sampler in samplers(length, batch, before[0], cut_by(before[1]))]
    cursor = Cursor(epoch=0, position=min(length, stop * batch), step=stop)
    rest = [list(sampler) for sampler in samplers(length, batch, after[0], cut_by(after[1]), cursor=cursor)]

    def used(parts, weights, steps_of, offset):
        out = []
        for step in range(*steps_of):
            split = cut_by(weights)(step, min(batch, length - step * batch))
            out += [i for part, b in zip(parts, split, strict=True) if b for i in part[step - offset]]
        return out

    whole = used(first, before[1], (0, stop), 0) + used(rest, after[1], (stop, steps), stop)
    assert whole == Shuffled(length, 0).indices(0, 0, length)


@given(st.integers(1, 300), st.lists(st.integers(1, 80), min_size=1, max_size=12), runs(), st.booleans(), st.data())
def test_each_sample_exactly_once_through_every_change_of_the_batch(length, sizes, run, drop_last, data):
    """Batches of any sequence, splits of any sequence, a resume anywhere on another number of workers."""
    size, weights = run

    def batch(step, samples):
        return min(length, sizes[step % len(sizes)])

    ranks = samplers(length, batch, size, cut_by(weights), drop_last=drop_last)
    whole = [list(sampler) for sampler in ranks]
    cursor, cursors, used = Cursor(), [Cursor()], 0
    ranks[0].begin(cursor)
    while not cursor.over:
        in_force, total = ranks[0].total(cursor)
        assert total == in_force or (not drop_last and used + total == length) or used + total == length
        used += total
        ranks[0].advance(cursor, in_force, total)
        cursors.append(Cursor(**vars(cursor)))
    steps = len(cursors) - 1
    assert {len(part) for part in whole} == {steps}
    assert used == length or (drop_last and length - used < batch(steps - 1, 0))
    stop = data.draw(st.integers(0, steps))
    rest = [list(one) for one in samplers(length, batch, 1, lambda step, total: (total,), drop_last, 0, cursors[stop])]
    taken = []
    for step in range(stop):
        split = cut_by(weights)(step, cursors[step + 1].position - cursors[step].position)
        taken += [i for part, b in zip(whole, split, strict=True) if b for i in part[step]]
    taken += [i for part in rest[0] for i in part]
    assert taken == Shuffled(length, 0).indices(0, 0, used)


def test_drop_last_leaves_out_what_is_less_than_the_batch_before_it():
    (sampler,) = samplers(100, lambda step, samples: (30, 30, 45)[min(step, 2)], 1, lambda step, total: (total,), True)
    assert [len(part) for part in sampler] == [30, 30, 40]  # the batch grew, and the rest is as large as the one before
    (sampler,) = samplers(100, lambda step, samples: (30, 50, 45)[min(step, 2)], 1, lambda step, total: (total,), True)
    assert [len(part) for part in sampler] == [30, 50]


def test_drop_last_leaves_out_the_short_batch():
    (sampler,) = samplers(25, 10, 1, lambda step, total: (total,), drop_last=True)
    assert [len(part) for part in sampler] == [10, 10]
    assert len(sampler) == 2


def test_plans_hold_from_their_step_on():
    fixed, limits = Fixed((1, 1)), Limits.of(2)
    book = PlanBook(Plan(0, fixed, fixed.init(2), limits, 8))
    other = Fixed((1, 3))
    book.add(Plan(5, other, other.init(2), limits, 8))
    assert book.at(4).cut(8) == (4, 4)
    assert book.at(5).cut(8) == (2, 6)
    book.forget(7)
    assert [plan.start for plan in book.plans] == [5]
    replaced = Plan(5, fixed, fixed.init(2), limits, 8)
    book.add(replaced)
    assert book.plans == [replaced]


def test_weights_sum_to_one_and_an_idle_worker_counts_nothing():
    from paceline.policies.balance import DP

    share = Plan(0, Fixed((1, 3)), None, Limits.of(2), 8)
    assert share.weights((2, 6)) == (0.25, 0.75)
    assert share.weights((0, 6)) == (0.0, 1.0)
    mean = Plan(0, DP, DP.init(2), Limits.of(2), 8)
    assert mean.weights((2, 6)) == (0.5, 0.5)
    assert mean.weights((0, 6)) == (0.0, 1.0)
