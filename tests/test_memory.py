"""Caps from the user and from running out of memory for real."""

from __future__ import annotations

import resource
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.errors import PacelineError
from paceline.runtime.batches import cut
from tests import ranks
from tests.nets import flat, mlp, points

SIZE = 2


class Hungry(torch.autograd.Function):
    """The identity, but its backward (or forward) needs `megabytes` for every sample, for a moment."""

    @staticmethod
    def forward(ctx, x, megabytes, where):
        ctx.megabytes, ctx.where = megabytes, where
        if where == "forward":
            torch.ones(len(x), megabytes * 2**18).sum()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            torch.ones(len(grad), ctx.megabytes * 2**18).sum()
        return grad, None, None


class Net(nn.Module):
    """The hungry layer sits in the middle: gradients of the later layers are out before memory ends."""

    def __init__(self, megabytes, where):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 300), nn.Linear(300, 3)
        self.register_buffer("count", torch.zeros(()))  # broadcast before forward, as batch-norm statistics are
        self.megabytes, self.where = megabytes, where

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(Hungry.apply(hidden, self.megabytes, self.where))


def limit_memory(megabytes):
    """Let this process allocate only so much more."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20, resource.RLIM_INFINITY))


def train(where, limited, handed_over, bucket_bytes=None):
    from paceline.runtime import step as step_module

    if bucket_bytes is not None:
        step_module.BUCKET_BYTES = bucket_bytes
    pace = paceline.init(balance="equal", timeout_s=40, replan_every=1)
    model = Net(16, where)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(96), 32)
    if limited and pace.rank == 1:
        time.sleep(0.5)
        limit_memory(240)  # 16 samples of 16 MB do not fit, 8 do
    splits, losses = [], []
    for _ in range(2):
        for x, y in loader:
            splits.append(pace._total.samples)
            if handed_over:
                loss = pace.step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y))
                losses.append(float(loss))
            else:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return flat(model.module), splits, losses


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_handed_over_survives_out_of_memory_exactly(where):
    free = ranks.run(SIZE, train, where, False, True)
    short = ranks.run(SIZE, train, where, True, True, 4)  # a bucket per parameter: some are sent before memory ends
    plain = ranks.run(1, train, where, False, False)
    for rank in range(SIZE):
        torch.testing.assert_close(short[rank][0], free[rank][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(free[rank][0], plain[0][0], rtol=1e-5, atol=1e-6)
        assert torch.equal(short[rank][0], short[0][0])
    assert short[1][1][0] == 16
    assert short[1][1][-1] == 8  # the cap was learned
    assert short[0][1][-1] == 24  # and the others took over
    assert short[1][2][0] == pytest.approx(free[1][2][0], rel=1e-5)  # the loss is the whole share's


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_untouched_loop_names_the_batch_and_the_way_out(where):
    out = ranks.outcomes(SIZE, train, where, True, False, timeout_s=40)
    assert "worker 1 ran out of memory at step 0 on its share of 16 samples" in out[1].error
    assert "Set max_local_batch to fewer" in out[1].error
    assert out[0].kind in ("PeerLost", "PeerTimeout")


def too_little():
    pace = paceline.init(timeout_s=20)
    model = Net(300, "forward")
    model = pace.wrap(model, None)
    for x, y in pace.loader(points(8), 4):
        limit_memory(100)
        pace.step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y))


def test_when_not_even_one_sample_fits():
    out = ranks.outcomes(1, too_little)
    assert "ran out of memory" in out[0].error
    assert out[0].exit_code == 1


def caps(settings):
    pace = paceline.init(timeout_s=20, **settings)
    loader = pace.loader(points(100), 40)
    return loader.split


def caps_by_rank():
    import os

    return caps({"max_local_batch": 30 if os.environ["RANK"] == "0" else 12})


def test_caps_are_respected():
    assert ranks.run(SIZE, caps, {"max_local_batch": (10, None)}) == [(10, 30)] * SIZE
    assert ranks.run(SIZE, caps, {"max_local_batch": 25, "granularity": 8}) == [(24, 16)] * SIZE
    assert ranks.run(SIZE, caps_by_rank) == [(28, 12)] * SIZE  # each worker may say its own


def test_a_batch_that_fits_nobody_is_refused_with_the_difference():
    out = ranks.outcomes(SIZE, caps, {"max_local_batch": 16})
    assert all(
        "room for 32 samples a step over 2 workers, the global batch is 40: 8 too many" in one.error for one in out
    )


def unused_in_step():
    """A parameter nobody uses keeps no gradient, as in one process; one used on some workers is summed."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x, use_b):
            return self.a(x) + (self.b(x) if use_b else 0)

    pace = paceline.init(timeout_s=20)
    model = pace.wrap(Two(), None, find_unused_parameters=True)
    for x, y in pace.loader(points(8), 8):
        pace.step(lambda batch: F.cross_entropy(model(batch[0], pace.rank == 0), batch[1]), (x, y))
    return [p.grad is None for p in model.parameters()], float(model.module.b.weight.grad.abs().sum())


def test_unused_parameters_in_a_step_handed_over():
    results = ranks.run(SIZE, unused_in_step)
    assert results[0] == results[1]
    assert results[0][0] == [False, False, False, False, True, True]
    assert results[0][1] > 0


def test_cutting_batches():
    x = torch.arange(6)
    assert cut({"x": x, "names": list("abcdef")}, 2, 4, 6)["names"] == ["c", "d"]
    assert cut([x, (x, x)], 0, 6, 6)[0] is x
    assert [t.tolist() for t in cut((x, x + 1), 4, 6, 6)] == [[4, 5], [5, 6]]
    with pytest.raises(PacelineError, match=r"expected 6 there, got a tensor of shape \(3,\)"):
        cut([x, torch.zeros(3)], 0, 2, 6)
    with pytest.raises(PacelineError, match="got object"):
        cut(object(), 0, 2, 6)


def test_pace_step_needs_a_model():
    out = ranks.outcomes(1, no_model)
    assert "call pace.wrap(model, optimizer) first" in out[0].error


def no_model():
    paceline.init().step(lambda batch: mlp()(batch), torch.zeros(1, 8))
