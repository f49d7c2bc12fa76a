"""Training on owned shards, on real gloo ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.errors import ConfigError
from paceline.events import events_path, read
from paceline.runtime.shard_sampler import ShardSampler, check_room, wanted
from paceline.types import Limits
from tests import ranks
from tests.nets import flat, mlp
from tests.test_batch import numbered

COUNT = 192


def plan_of(speeds, *, features=True):
    x, y, _ = numbered().tensors
    plan = paceline.partition(x.numpy(), y.numpy(), speeds=speeds, method="balanced")
    return plan if features else paceline.ShardPlan(**{**vars(plan), "data": None})


def train(
    speeds, epochs=3, proposals=(), options=None, loader_options=None, stop=None, save=None, resume=None, features=True
):
    with paceline.init(timeout_s=30, balance="equal", **(options or {})) as pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        model = pace.wrap(model, optimizer)
        told = []
        plan = plan_of(speeds, features=features)
        loader = pace.loader(
            numbered(),
            24,
            partition=plan,
            moved=lambda plan, moves: told.append((plan, moves)),
            **(loader_options or {}),
        )
        if resume is not None:
            pace.load(resume)
        history = []
        while loader.epoch < epochs:
            epoch = loader.epoch
            for x, y, number in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                history.append((epoch, number.tolist() if pace._total.samples else []))
                if loader.step == stop:
                    pace.save(save)
                    return history, None, [], flat(model.module)
            if epoch < len(proposals):
                loader.coordinator.proposal = proposals[epoch]
        moves = [(one.parts.tolist(), len(two), two.fewest) for one, two in told]
        return history, loader.shards.parts.tolist(), moves, flat(model.module)


def joined(results):
    return [[i for _, rows in step for i in rows] for step in zip(*(r[0] for r in results), strict=True)]


def alone(batches):
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    x, y, _ = numbered().tensors
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows].double()), y[rows]).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("loader", [{}, {"num_workers": 1}], ids=["plain", "prefetch"])
def test_every_worker_trains_on_its_own_shard(loader):
    epochs = 1 if loader else 3  # each epoch starts loader processes
    results = ranks.run(3, train, [1, 2, 5], epochs, (), None, loader, timeout_s=120)
    plan = plan_of([1, 2, 5])
    for rank, (history, parts, _, _) in enumerate(results):
        assert parts == plan.parts.tolist()
        for epoch in range(epochs):
            used = [i for at, rows in history if at == epoch for i in rows]
            assert sorted(used) == plan.samples(rank).tolist()  # each of its own once, nobody else's
        orders = [[i for at, rows in history if at == epoch for i in rows] for epoch in range(2)]
        assert orders[0] != orders[1]  # a new order each epoch, or no second one
    batches = joined(results)
    assert len(batches) == epochs * (COUNT // 24)
    assert {len(batch) for batch in batches} <= set(range(21, 28))
    for result in results:
        torch.testing.assert_close(result[3].double(), alone(batches), rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 50), st.booleans(), st.data())
def test_shards_are_used_once_in_equal_steps(counts, batch, drop_last, data):
    size = len(counts)
    batch = max(batch, size)
    parts = np.random.default_rng(0).permutation(np.repeat(np.arange(size), counts))
    made = [ShardSampler(parts, size, batch, rank=rank, seed=3, drop_last=drop_last) for rank in range(size)]
    lists = [list(sampler) for sampler in made]
    assert {len(one) for one in lists} == {made[0].steps} == {len(sampler) for sampler in made}
    cursor, used = made[0].cursor, [[] for _ in counts]
    stop = data.draw(st.integers(0, made[0].steps))
    for step in range(made[0].steps):
        split = made[0].split(cursor)
        assert sum(split) > 0
        for rank, taken in enumerate(split):
            assert all(parts[i] == rank for i in lists[rank][step])
            assert len(lists[rank][step]) == taken or taken == 0
            used[rank] += lists[rank][step] if taken else []
        made[0].advance(cursor, 0, sum(split))
        if step + 1 == stop:  # a resume goes on with what is left
            made[-1].cursor.position, made[-1].cursor.step = cursor.position, cursor.step
            assert list(made[-1]) == lists[-1][stop:]
    assert cursor.over
    assert [sorted(one) for one in used] == [np.flatnonzero(parts == rank).tolist() for rank in range(size)]


def test_shards_follow_speeds_between_epochs(tmp_path):
    proposals = [None, (12, 8, 4), (12, 8, 4)]
    results = ranks.run(3, train, [1, 1, 1], 4, proposals, {"run_dir": str(tmp_path)}, timeout_s=120)
    parts = results[0][1]
    assert all(result[1] == parts for result in results)
    assert np.bincount(parts).tolist() == [96, 64, 32]
    moves = results[0][2]
    assert len(moves) == 1  # the second proposal is what there is already
    assert moves[0][0] == parts
    assert moves[0][1] == moves[0][2] == 32
    before = plan_of([1, 1, 1]).parts
    for rank, (history, _, _, _) in enumerate(results):
        for epoch in range(4):
            mine = np.flatnonzero((before if epoch < 2 else np.array(parts)) == rank)
            assert sorted(i for at, rows in history if at == epoch for i in rows) == mine.tolist()
    (event,) = [event for event in read(events_path(tmp_path, 1)) if event["type"] == "shards"]
    assert (event["moved"], event["fewest"], event["sizes"], event["epoch"]) == (32, 32, [96, 64, 32], 2)
    stay = ranks.run(2, train, [1, 1], 2, [(20, 4)], {"run_dir": str(tmp_path / "stay")}, None, None, None, None, False)
    assert np.bincount(stay[0][1]).tolist() == [96, 96]
    assert "a plan needs its data to be changed" in events_path(tmp_path / "stay", 0).read_text()


def test_resume_keeps_shards(tmp_path):
    proposals = [(12, 8, 4), (12, 8, 4), (12, 8, 4)]
    whole = ranks.run(3, train, [1, 1, 1], 3, proposals, timeout_s=120)
    path = tmp_path / "middle.safetensors"
    first = ranks.run(3, train, [1, 1, 1], 3, proposals, None, None, 11, path, timeout_s=120)
    rest = ranks.run(3, train, [1, 1, 1], 3, proposals, None, None, None, None, path, timeout_s=120)
    assert joined(first) + joined(rest) == joined(whole)
    assert rest[0][1] == whole[0][1]
    assert torch.equal(rest[0][3], whole[0][3])
    outcomes = ranks.outcomes(2, train, [1, 1], 3, (), None, None, None, None, path)
    assert all("between epochs only" in one.error for one in outcomes)
    at_end = tmp_path / "end.safetensors"
    ranks.run(3, train, [1, 1, 1], 3, (), None, None, 8, at_end, timeout_s=120)
    fewer = ranks.run(2, train, [1, 1], 2, (), None, None, None, None, at_end, timeout_s=120)
    assert sorted(i for result in fewer for _, rows in result[0] for i in rows) == list(range(COUNT))


def test_when_shards_are_cut_anew():
    assert not wanted(None, [10, 10])
    assert not wanted((12, 12), [96, 96])
    assert not wanted((97, 95), [96, 96])
    assert not wanted((13, 11), [96, 96])  # a sample of the batch is all that is between them
    assert wanted((130, 110), [96, 96])
    assert not wanted((11, 11, 10), [64, 64, 64])
    limits = Limits.of(3, lower=2, cap=(None, 8, None))
    assert check_room([20, 20, 20], 4, limits) == ""
    assert "worker 1 would take 9 samples a step, max_local_batch is 8" in check_room([20, 33, 20], 4, limits)
    assert "worker 2 would take 1 samples a step, min_local_batch is 2" in check_room([20, 20, 7], 4, limits)
    assert "worker 0 would own nothing" in check_room([0, 20, 7], 4, limits)


def test_bad_input():
    plan = plan_of([1])
    for options, arguments, text in (
        ({}, {"partition": plan_of([1, 2])}, "the plan has 2 parts, this run 1 workers"),
        ({"batch": "noise-scale"}, {"partition": plan}, "constant batch"),
        ({}, {"partition": plan, "accumulate": 2}, "without accumulate"),
        ({}, {"partition": plan, "shuffle": False}, "shuffled by themselves"),
        ({"balance": "dbs"}, {"partition": plan}, "which owned shards do not follow"),
        ({"max_local_batch": 16}, {"partition": plan}, "max_local_batch"),
    ):
        with paceline.init(**options) as pace:
            with pytest.raises(ConfigError, match=text):
                pace.loader(numbered(), 24, **arguments)
    with paceline.init() as pace:
        with pytest.raises(ConfigError, match="it has 192 samples, this dataset 100"):
            pace.loader(numbered(100), 24, partition=plan)
    with pytest.raises(ConfigError, match="shard 1 is empty"):
        ShardSampler(np.zeros(9, np.int64), 2, 4, rank=1, seed=0)


def features_and_plan(bad=False):
    with paceline.init(timeout_s=30) as pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model = pace.wrap(model, optimizer)
        found = pace.features(numbered(), batch_size=7)
        own = pace.features(numbered(), fn=lambda batch: batch[0][:, :2], batch_size=50)
        labels = numbered().tensors[1].numpy()
        plan = pace.partition(found, None if bad else labels, speeds=[1, -2, 3] if bad else [1, 2, 3])
        loader = pace.loader(numbered(), 24, partition=plan)
        for x, y, _ in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return found, own, plan.parts.tolist(), plan.metrics, plan.data is None


def test_features_of_the_model_and_a_plan_for_everybody():
    results = ranks.run(3, features_and_plan, timeout_s=120)
    found, own, parts, metrics, _ = results[0]
    model = mlp()
    x = numbered().tensors[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, model[:-1](x).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(own, x[:, :2].numpy())
    assert all(result[0] is None for result in results[1:])
    assert all(result[2] == parts and result[3] == metrics for result in results)
    assert [result[4] for result in results] == [False, True, True]
    assert np.bincount(parts).tolist() == [32, 64, 96]
    outcomes = ranks.outcomes(3, features_and_plan, True)
    assert all("no shards: speeds must be numbers" in one.error for one in outcomes)


def apart(sync):
    x, y, _ = numbered().tensors
    with paceline.init(timeout_s=30, sync=sync, balance="equal") as pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model = pace.wrap(model, optimizer)
        plan = paceline.partition(x.numpy(), y.numpy(), speeds=[1, 2], method="contiguous")
        loader = pace.loader(numbered(), 24, partition=plan)

        def loss(batch):
            return F.cross_entropy(model(batch[0]), batch[1])

        found = pace.dissimilarity(loss, batch_size=50)
        before = flat(model.module)
        for batch in loader:
            loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            pace.dissimilarity(loss, batch_size=50)  # looking in the middle of an epoch disturbs nothing
        return found, before, plan.parts


@pytest.mark.parametrize("sync", ["allreduce", "local:h=4"])
def test_gradients_of_shards_lie_apart(sync):
    results = ranks.run(2, apart, sync, timeout_s=60)
    assert results[0][0] == results[1][0]
    found, before, parts = results[0]
    assert torch.equal(before, flat(mlp()))  # looking changes nothing
    x, y, _ = numbered().tensors
    gradients = []
    for part in range(2):
        model = mlp().double()
        rows = np.flatnonzero(parts == part)
        F.cross_entropy(model(x[rows].double()), y[rows]).backward()
        gradients.append((len(rows) / COUNT, torch.cat([p.grad.view(-1) for p in model.parameters()])))
    joint = sum(w * g for w, g in gradients)
    zeta2 = sum(w * float((g - joint).square().sum()) for w, g in gradients)
    assert found["zeta2"] == pytest.approx(zeta2, rel=1e-4)
    assert found["square"] == pytest.approx(float(joint.square().sum()), rel=1e-4)
    with paceline.init() as pace, pytest.raises(ConfigError, match=r"call pace.wrap first"):
        pace.dissimilarity(lambda batch: batch)
