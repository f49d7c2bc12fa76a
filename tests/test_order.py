from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime import order as orders
from paceline.runtime.order import FromSampler, Sequential, Shuffled, digest


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 50), st.data())
def test_a_permutation_in_any_slices(length, seed, epoch, data):
    shuffled = Shuffled(length, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    pieces = [shuffled.indices(epoch, a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    whole = [index for piece in pieces for index in piece]
    assert sorted(whole) == list(range(length))
    assert whole == Shuffled(length, seed).indices(epoch, 0, length)


def test_long_orders_are_not_kept_but_equal(monkeypatch):
    kept = Shuffled(5000, 3).indices(2, 1000, 1100)
    monkeypatch.setattr(orders, "KEEP", 100)
    assert Shuffled(5000, 3).indices(2, 1000, 1100) == kept


def test_a_billion_samples_cost_a_slice_only():
    indices = Shuffled(10**9, 0).indices(0, 5 * 10**8, 5 * 10**8 + 1000)
    assert len(set(indices)) == 1000
    assert all(0 <= index < 10**9 for index in indices)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_are_equally_likely(length):
    trials, kinds = 900, math.factorial(length)
    counts = Counter(
        tuple(Shuffled(length, seed).indices(epoch, 0, length)) for seed in range(30) for epoch in range(30)
    )
    expected = trials / kinds
    chi_squared = (
        sum((count - expected) ** 2 / expected for count in counts.values()) + (kinds - len(counts)) * expected
    )
    assert chi_squared < (kinds - 1) + 4 * math.sqrt(2 * (kinds - 1))


def test_neighbours_do_not_stay_together():
    whole = Shuffled(4096, 1).indices(0, 0, 4096)
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(whole)) < 12


def test_seeds_and_epochs_differ_and_the_order_is_fixed_for_good():
    assert Shuffled(10, 0).indices(0, 0, 10) != Shuffled(10, 0).indices(1, 0, 10)
    assert Shuffled(10, 0).indices(0, 0, 10) != Shuffled(10, 1).indices(0, 0, 10)
    # A checkpoint of today must mean the same samples tomorrow: this value must never change.
    assert Shuffled(10, 0).indices(0, 0, 10) == GOLDEN


GOLDEN = [2, 7, 1, 9, 6, 8, 5, 4, 3, 0]


def test_own_sampler_and_sequence():
    class Backwards:
        def __init__(self):
            self.epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(5 + self.epoch, 0, -1))

    order = FromSampler(Backwards())
    assert (order.length(0), order.length(2)) == (5, 7)
    assert order.indices(2, 1, 3) == [6, 5]
    assert Sequential(4).indices(9, 1, 3) == [1, 2]
    assert digest(Sequential(4), 0) != digest(Sequential(5), 0)
