"""Gradients as bf16 on the wire: what is lost in a step is made good later, and everybody gets the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.comm import LoopbackWorld, TorchComm
from paceline.errors import ConfigError
from paceline.runtime.compress import HalfSum
from paceline.runtime.hook import WeightedSum
from tests import ranks
from tests.nets import flat, mlp, points
from tests.test_comm import in_threads

STEPS, LENGTH = 64, 1003  # not a multiple of the workers: slices are padded


def sums(comm):
    """Many sums of gradients that do not change much; the results, and the exact ones."""
    half, got, exact = HalfSum(comm), [], []
    for step in range(STEPS):
        mine = [
            torch.randn(LENGTH, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + rank)
            for rank in range(comm.size)
        ]
        buffers = [mine[comm.rank].clone(), mine[comm.rank][:10].clone()]
        under_way = [half.start(buffer, place) for place, buffer in enumerate(buffers)]
        for one in reversed(under_way):  # waiting out of order is fine
            one.wait()
        total = torch.stack([one.double() for one in mine]).sum(0)
        assert torch.allclose(buffers[1].double(), total[:10], atol=0.1)
        got.append(buffers[0].double())
        exact.append(total)
    return torch.stack(got), torch.stack(exact)


def check(results):
    for got, exact in results:
        assert torch.equal(got, results[0][0])  # the same bits everywhere
        scale = exact.abs().mean()
        one_step = (got[0] - exact[0]).abs().mean() / scale
        assert 1e-4 < one_step < 2**-7
        over_all = (got.mean(0) - exact.mean(0)).abs().mean() / scale
        assert over_all < one_step / 20  # a sum of roundings would only fall with the square root of 64


def real(_):
    comm = TorchComm(torch.device("cpu"), None, 60)
    result = sums(comm)
    comm.close(graceful=True)
    return result


def test_error_feedback_over_gloo():
    check(ranks.run(3, real, None))


def test_error_feedback_on_the_double():
    world = LoopbackWorld(3)
    check(in_threads(world, sums))


def overflow(comm):
    half = HalfSum(comm)
    values = []
    for step in range(3):
        buffer = torch.ones(8)
        if step == 1 and comm.rank == 0:
            buffer[3] = float("inf")
        half.start(buffer, 0).wait()
        values.append(buffer)
    return values


def test_an_overflow_is_seen_once_and_does_not_stay():
    for values in in_threads(LoopbackWorld(2), overflow):
        assert values[0].tolist() == [2.0] * 8
        assert not torch.isfinite(values[1][3])
        assert values[2].tolist() == [2.0] * 8


def train(compress):
    pace = paceline.init(balance="fixed:1,2,3", timeout_s=60)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model = pace.wrap(model, optimizer, compress=compress, bucket_cap_mb=0.0001)
    loader = pace.loader(points(200), 24, drop_last=True)
    for _ in range(5):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def test_training_ends_near_the_exact_result():
    exact = ranks.run(3, train, None)
    close = ranks.run(3, train, "bf16")
    assert all(torch.equal(one, close[0]) for one in close)
    start = flat(mlp())
    moved = (exact[0] - start).norm()
    assert 0 < (close[0] - exact[0]).norm() < 0.01 * moved


def mixed(_):
    """A small bucket at every place, among compressed ones: lanes must be used in the same order everywhere."""
    comm = TorchComm(torch.device("cpu"), None, 60)
    total = WeightedSum(comm)
    total.half = HalfSum(comm)
    total.weigh(1.0)
    for step in range(40):
        buffers = [
            torch.full((50_000,), float(comm.rank + place), dtype=torch.bfloat16 if place in (1, 2) else torch.float32)
            for place in range(6)
        ]
        if (comm.rank + step) % 3 == 0:
            torch.randn(300, 300) @ torch.randn(300, 300)  # workers are not in step
        for buffer in buffers:
            total.send(buffer)
        total.last_sent()
        total.finish()
        for place, buffer in enumerate(buffers):
            assert buffer[[0, -1]].tolist() == [sum(rank + place for rank in range(comm.size))] * 2
    comm.close(graceful=True)


def test_compressed_and_other_buckets_side_by_side():
    ranks.run(3, mixed, None)


def test_bad_compression():
    pace = paceline.init()
    with pytest.raises(ConfigError, match="compress must be None or 'bf16', got 'fp8'"):
        pace.wrap(mlp(), compress="fp8")
    pace.close()


def test_small_gradients_are_left_alone():
    """A bf16 bucket is sent as before: in fp32."""
    comm = LoopbackWorld(1).comm(0)
    total = WeightedSum(comm)
    total.half = HalfSum(comm)
    buffer = torch.ones(4, dtype=torch.bfloat16)
    total.weigh(1.0)
    total.send(buffer)
    total.last_sent()
    total.finish()
    assert buffer.tolist() == [1.0] * 4
    assert not total.half._pieces
