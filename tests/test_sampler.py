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


def test_drop_last_leaves_out_the_short_batch():
    (sampler,) = samplers(25, 10, 1, lambda step, total: (total,), drop_last=True)
    assert [len(part) for part in sampler] == [10, 10]
    assert len(sampler) == 2


def test_plans_hold_from_their_step_on():
    fixed, limits = Fixed((1, 1)), Limits.of(2)
    book = PlanBook(Plan(0, fixed, fixed.init(2), limits))
    other = Fixed((1, 3))
    book.add(Plan(5, other, other.init(2), limits))
    assert book.at(4).cut(8) == (4, 4)
    assert book.at(5).cut(8) == (2, 6)
    book.forget(7)
    assert [plan.start for plan in book.plans] == [5]
    replaced = Plan(5, fixed, fixed.init(2), limits)
    book.add(replaced)
    assert book.plans == [replaced]


def test_weights_sum_to_one_and_an_idle_worker_counts_nothing():
    from paceline.policies.balance import DP

    share = Plan(0, Fixed((1, 3)), None, Limits.of(2))
    assert share.weights((2, 6)) == (0.25, 0.75)
    assert share.weights((0, 6)) == (0.0, 1.0)
    mean = Plan(0, DP, DP.init(2), Limits.of(2))
    assert mean.weights((2, 6)) == (0.5, 0.5)
    assert mean.weights((0, 6)) == (0.0, 1.0)
