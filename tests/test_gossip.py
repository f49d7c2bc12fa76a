"""Gossip on real gloo ranks, against one process that plays all workers in float64."""

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
from paceline.policies.sync import Gossip, sync_policy
from paceline.policies.sync.gossip import mixing, neighbours, rounds
from paceline.runtime import gossip
from tests import ranks
from tests.nets import flat, mlp
from tests.test_batch import numbered


@st.composite
def graphs(draw):
    size = draw(st.integers(2, 9))
    kind = draw(st.sampled_from(["ring", "torus", "complete"]))
    return size, Gossip(graph=kind).links(size)


@given(graphs(), st.data())
def test_mixing_keeps_the_weighted_mean_and_leads_there(graph, data):
    size, edges = graph
    samples = [data.draw(st.integers(1, 50)) for _ in range(size)]
    degree = [len(neighbours(edges, worker)) for worker in range(size)]
    matrix = np.zeros((size, size))
    for worker in range(size):
        near = neighbours(edges, worker)
        own, weights = mixing(samples[worker], degree[worker], [(samples[n], degree[n]) for n in near])
        matrix[worker, worker] = own
        matrix[worker, near] = weights
    assert (matrix > -1e-12).all()
    assert np.allclose(matrix.sum(axis=1), 1)
    share = np.array(samples) / sum(samples)
    assert np.allclose(share @ matrix, share)  # the mean by samples stays
    moduli = sorted(np.abs(np.linalg.eigvals(matrix)))
    assert moduli[-2] < 1 - 1e-6  # and all come to it
    groups = rounds(edges)
    assert sorted(edge for group in groups for edge in group) == sorted(edges)
    assert all(len({worker for edge in group for worker in edge}) == 2 * len(group) for group in groups)


def test_graphs():
    assert Gossip().links(5) == ((0, 1), (0, 4), (1, 2), (2, 3), (3, 4))
    assert Gossip().links(2) == ((0, 1),)
    assert Gossip().links(1) == ()
    torus = Gossip(graph="torus").links(9)
    assert {len(neighbours(torus, worker)) for worker in range(9)} == {4}
    assert sync_policy("gossip:every=3,graph=torus") == Gossip(3, "torus")
    for wrong, text in (
        (lambda: Gossip(0), "every"),
        (lambda: Gossip(graph="star"), "graph must be one of ring, torus, complete"),
        (lambda: Gossip(edges=((0, 1), (2, 3))).links(4), r"no way leads from worker 0 to \[2, 3\]"),
        (lambda: Gossip(edges=((0, 7),)).links(3), r"two workers of 0 .. 2; got \(0, 7\)"),
        (lambda: paceline.init(sync="gossip", batch="noise-scale"), "neighbours alone meet"),
    ):
        with pytest.raises(ConfigError, match=text):
            wrong()


def train(policy, epochs=2, chunk=2**20, poison=None, run_dir=None, stop=None, save=None, resume=None):
    gossip.CHUNK = chunk
    x, y, _ = numbered().tensors
    with paceline.init(timeout_s=30, sync=policy, balance="equal", run_dir=run_dir) as pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        model = pace.wrap(model, optimizer)
        speeds = list(range(1, pace.size + 1))
        plan = paceline.partition(x.numpy(), y.numpy(), speeds=speeds, method="stratified")
        loader = pace.loader(numbered(), 24, partition=plan)
        if resume is not None:
            pace.load(resume)
        batches = []
        while loader.epoch < epochs:
            for x, y, number in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                batches.append(number.tolist())
                if poison == (pace.rank, loader.step):
                    with torch.no_grad():
                        model.module[0].weight[0, 0] = float("nan")
                if loader.step == stop:
                    pace.save(save)
                    return batches, flat(model.module), None, None
        before = flat(model.module).clone()
        with pace.consensus():
            mean = flat(model.module).clone()
        assert torch.equal(flat(model.module), before)
        pace.settle()
        return batches, before, mean, flat(model.module)


def reference(policy, batches):
    """All workers in one process."""
    size = len(batches)
    models = [mlp().double() for _ in range(size)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in models]
    x, y, _ = numbered().tensors
    edges = policy.links(size)
    degree = [len(neighbours(edges, worker)) for worker in range(size)]
    used = [0] * size
    for step in range(len(batches[0])):
        for worker in range(size):
            rows = batches[worker][step]
            optimizers[worker].zero_grad()
            F.cross_entropy(models[worker](x[rows].double()), y[rows]).backward()
            optimizers[worker].step()
            used[worker] += len(rows)
        if (step + 1) % policy.every == 0:
            old = [flat(model) for model in models]
            for worker in range(size):
                near = neighbours(edges, worker)
                own, weights = mixing(used[worker], degree[worker], [(used[n], degree[n]) for n in near])
                new = own * old[worker] + sum(w * old[n] for w, n in zip(weights, near, strict=True))
                torch.nn.utils.vector_to_parameters(new, models[worker].parameters())
    share = [n / sum(used) for n in used]
    ends = [flat(model) for model in models]
    return ends, sum(s * end for s, end in zip(share, ends, strict=True))


@pytest.mark.parametrize(
    ("policy", "size", "chunk"),
    [(Gossip(2), 4, 301), (Gossip(3, "torus"), 4, 2**20), (Gossip(1, edges=((0, 1), (1, 2))), 3, 77)],
)
def test_gossip_is_what_one_process_computes(policy, size, chunk):
    results = ranks.run(size, train, policy, 2, chunk, timeout_s=120)
    ends, mean = reference(policy, [result[0] for result in results])
    for (_, own, agreed, settled), end in zip(results, ends, strict=True):
        torch.testing.assert_close(own.double(), end, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(agreed.double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(settled.double(), mean, rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[0][1], results[1][1])  # replicas differ until they settle


def test_a_nan_stays_with_its_worker_and_is_healed(tmp_path):
    results = ranks.run(3, train, Gossip(2), 2, 2**20, (1, 3), str(tmp_path), timeout_s=120)
    assert all(bool(torch.isfinite(one).all()) for result in results for one in result[1:])
    left = [event for event in read(events_path(tmp_path, 0)) if event["type"] == "left-out"]
    assert left
    assert left[0]["replicas"] == [1]


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1 + torch.distributed.get_rank()
        return self.inner(x) + self.mask.clamp(min=-10)


def masked(poison):
    with paceline.init(timeout_s=20, sync="gossip:every=1", balance="equal") as pace:
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model = pace.wrap(model, optimizer)
        for x, y, _ in pace.loader(numbered(), 96):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if poison:
                with torch.no_grad():
                    model.module.inner[0].weight[0, 0] = float("nan")
        with pace.consensus():
            agreed = model.module.mask.clone(), model.module.seen.clone()
        return model.module.mask.clone(), model.module.seen.clone(), agreed, flat(model.module)


def test_buffers_are_mixed_and_masks_stay():
    results = ranks.run(2, masked, False)
    for mask, seen, agreed, own in results:
        assert mask.tolist() == [0.0, float("-inf"), 0.0] == agreed[0].tolist()
        assert torch.isfinite(own).all()
        torch.testing.assert_close(seen, results[0][1])  # two workers meet in the middle
        torch.testing.assert_close(agreed[1], seen)
    outcomes = ranks.outcomes(2, masked, True)
    assert any("nor those of its neighbours" in one.error for one in outcomes)


def test_gossip_resumes_where_it_was(tmp_path):
    whole = ranks.run(3, train, Gossip(2), 2, timeout_s=120)
    path = tmp_path / "state.safetensors"
    first = ranks.run(3, train, Gossip(2), 2, 2**20, None, None, 7, path, timeout_s=120)
    rest = ranks.run(3, train, Gossip(2), 2, 2**20, None, None, None, None, path, timeout_s=120)
    for one, two, all_of_it in zip(first, rest, whole, strict=True):
        assert one[0] + two[0] == all_of_it[0]
        assert torch.equal(two[1], all_of_it[1])


def test_a_world_of_one_has_nobody_to_talk_to():
    ((batches, own, mean, _),) = ranks.run(1, train, Gossip(2))
    assert len(batches) == 16
    assert torch.equal(own, mean)
