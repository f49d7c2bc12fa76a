"""The common decision, on the loopback double: no processes, scripted times, scripted faults."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import Fault, LoopbackWorld
from paceline.errors import NonFiniteError, PeerLost
from paceline.events import EventLog
from paceline.policies.balance import policy
from paceline.policies.batch import Constant
from paceline.runtime.coordinator import Coordinator
from paceline.runtime.meter import CpuClock, Meter, StepTimes
from paceline.runtime.sizing import Sizing
from paceline.types import Limits
from tests.test_comm import in_threads


class Told:
    """Stands in for a meter: hands out what it was given."""

    def __init__(self):
        self.ready = []

    def held(self, seconds):
        assert seconds >= 0

    def take(self):
        done, self.ready = self.ready, []
        return done

    def pending(self):
        return []

    def clear(self):
        self.ready = []


def workers(
    world,
    fixed,
    slope,
    steps,
    *,
    every=4,
    horizon=0,
    align=1,
    limits=None,
    poisoned=None,
    learned=None,
    new_size_s=None,
    late=0,
):
    """Every worker of the world runs the same steps with times from its line; returns the plans each came to."""

    def body(comm):
        meter = Told()
        coordinator = Coordinator(
            comm,
            policy("affine"),
            limits or Limits.of(comm.size),
            Sizing(Constant(), 120, 10**6, EventLog(None)),
            every=every,
            horizon=horizon,
            log=EventLog(None),
            meter=meter,
            align=align,
        )
        used, sizes, told = [], set(), []
        for step in range(steps):
            coordinator.turn(step, 0)
            split = coordinator.book.at(step).cut(120)
            used.append(split)
            mine = split[comm.rank]
            compute = fixed[comm.rank] + slope[comm.rank] * mine
            if new_size_s and mine not in sizes:
                compute += new_size_s[comm.rank]
            sizes.add(mine)
            finite = poisoned != (comm.rank, step)
            told.append(StepTimes(step, mine, 0.0, compute, 0.01, 0.0, True, finite))
            meter.ready += told[: len(told) - late]
            del told[: len(told) - late]
            if learned and learned[0] == comm.rank and step == 5:
                coordinator.learned_cap = learned[1]
        return used

    return in_threads(world, body)


def test_owned_shards_are_proposed_anew_only_if_that_is_faster():
    """Speeds 1:2 with a fixed cost; shards that are equal are worth moving, those at the optimum are not."""

    def body(comm, current):
        meter = Told()
        sizing = Sizing(Constant(), 120, 10**6, EventLog(None))
        coordinator = Coordinator(
            comm, policy("affine"), Limits.of(2), sizing, every=4, horizon=0, log=EventLog(None), meter=meter
        )
        coordinator.owned = lambda: current
        for step in range(30):
            coordinator.turn(step, 0)
            mine = current[comm.rank] + step % 2  # shards are not multiples: batches vary by one
            compute = 0.01 + (0.002, 0.001)[comm.rank] * mine
            meter.ready.append(StepTimes(step, mine, 0.0, compute, 0.0, 0.0))
        return coordinator.proposal, coordinator.book.latest.start

    for current, moves in (((60, 60), True), ((40, 80), False), ((41, 79), False)):
        for found, start in in_threads(LoopbackWorld(2), lambda comm, current=current: body(comm, current)):
            assert (found is not None) == moves
            assert not moves or 36 <= found[0] <= 44  # near the optimum, as far as batches of one size can tell
            assert start == 0  # plans stay as they are


def test_everybody_decides_the_same_and_the_optimum_is_found():
    plans = workers(LoopbackWorld(3), (0.02, 0.02, 0.02), (0.003, 0.0015, 0.001), 20)
    assert plans[0] == plans[1] == plans[2]
    assert plans[0][0] == (40, 40, 40)
    assert plans[0][-1] == (20, 40, 60)
    changes = [step for step in range(1, 20) if plans[0][step] != plans[0][step - 1]]
    assert changes == [5, 9]  # asked at 4 and 8, answered a step later


def test_the_first_step_of_a_new_size_is_left_out():
    """Kernels are chosen anew for a new shape: that step says nothing about the worker's speed."""
    fixed, slope = (0.02, 0.02, 0.02), (0.003, 0.0015, 0.001)
    calm = workers(LoopbackWorld(3), fixed, slope, 40)
    slow_start = workers(LoopbackWorld(3), fixed, slope, 40, new_size_s=(0.0, 0.0, 0.5), late=1)
    assert list(dict.fromkeys(slow_start[0])) == list(dict.fromkeys(calm[0]))


@pytest.mark.parametrize(("horizon", "align", "first"), [(6, 1, 11), (0, 4, 8), (6, 4, 12)])
def test_a_plan_waits_for_batches_already_cut_and_for_the_optimizer_step(horizon, align, first):
    plans = workers(LoopbackWorld(2), (0.0, 0.0), (0.003, 0.001), 24, horizon=horizon, align=align)
    changes = [step for step in range(1, 24) if plans[0][step] != plans[0][step - 1]]
    assert changes[0] == first


def test_a_learned_cap_reaches_every_plan():
    plans = workers(LoopbackWorld(2), (0.0, 0.0), (0.001, 0.001), 20, learned=(1, 25))
    assert plans[0][-1] == plans[1][-1] == (95, 25)


def test_learned_caps_that_leave_no_room_are_gone_over():
    plans = workers(LoopbackWorld(2), (0.0, 0.0), (0.001, 0.001), 20, limits=Limits.of(2, cap=80), learned=(1, 25))
    assert plans[0][-1] == (60, 60)


def test_a_poisoned_step_is_named_by_all():
    for error in workers(LoopbackWorld(3), (0.0,) * 3, (0.001,) * 3, 20, poisoned=(2, 6)):
        assert isinstance(error, NonFiniteError)
        assert "that of worker 2 was NaN or infinite at step 6" in str(error)


def test_a_lost_worker_ends_the_decision_for_all():
    world = LoopbackWorld(3, faults=[Fault(1, "gather", 1, "lose")])
    out = workers(world, (0.0,) * 3, (0.001,) * 3, 20)
    assert [type(error) for error in out] == [PeerLost] * 3
    assert world.fired == world.faults


def test_the_meter_keeps_the_four_times_apart():
    moments = iter([0.0, 1.0, 3.0, 3.5, 3.75, 10.0, 11.0, 12.0])
    meter = Meter(clock=CpuClock(lambda: next(moments)))
    meter.fetch()
    meter.batch(0, 8)
    meter.ready()
    meter.summed()
    meter.updated()
    (early,) = meter.pending()
    meter.fetch()
    meter.batch(1, 4, full=False)
    meter.fetch()  # a micro-batch without a sum: all of it is compute
    first, second = meter.take()
    assert first == early
    assert (first.data_wait_s, first.compute_s, first.comm_s, first.optimizer_s) == (1.0, 2.0, 0.5, 0.25)
    assert first.busy_s == 3.25
    assert (second.samples, second.full, second.compute_s, second.comm_s, second.optimizer_s) == (
        4,
        False,
        1.0,
        0.0,
        0.0,
    )
    assert meter.take() == []


def test_a_step_the_optimizer_skipped_is_not_poisoned():
    meter = Meter()
    for updated in (False, True):
        meter.fetch()
        meter.batch(0, 1)
        meter.norm(torch.tensor(float("nan")))
        meter.ready()
        if updated:
            meter.updated()
    meter.fetch()
    assert [times.finite for times in meter.take()] == [True, False]


def test_a_short_last_batch_alone_still_ends_the_epoch():
    """The window after the last full one holds nothing but the epoch's short batch: a per-epoch policy must hear of the end."""
    from paceline.policies.balance import DBS

    def body(comm):
        meter = Told()
        coordinator = Coordinator(
            comm,
            DBS,
            Limits.of(2),
            Sizing(Constant(), 120, 10**6, EventLog(None)),
            every=3,
            horizon=0,
            log=EventLog(None),
            meter=meter,
        )
        for step in range(7):
            coordinator.turn(step, 0)
            samples = coordinator.book.at(step).cut(120)[comm.rank]
            meter.ready.append(StepTimes(step, samples, 0.0, 0.1 * (1 + 2 * comm.rank), 0.0, 0.0, full=step < 6))
        coordinator.turn(7, 0, ends_epoch=True)
        coordinator.turn(7, 1)
        return coordinator.book.at(7).cut(120)

    assert in_threads(LoopbackWorld(2), body) == [(90, 30)] * 2
