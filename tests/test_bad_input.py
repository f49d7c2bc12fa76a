"""Each mistake ends in one clear error, on every worker, without a hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import paceline
from tests import ranks
from tests.nets import mlp, points

SIZE = 3


class Breaks(Dataset):
    """Raises on one worker."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index % 7 == 0:
            raise OSError("the disk of worker 1 is broken")
        return torch.zeros(8), 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def train(dataset, batch=12, steps=40, poison=None, settings=None, **loader_settings):
    pace = paceline.init(timeout_s=15, **(settings or {}))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(dataset, batch, **loader_settings)
    while loader.step < steps:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if poison is not None and pace.rank == 1 and loader.step == 6:
                loss = loss * poison
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def broken_data(num_workers):
    train(Breaks(), num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_raises_in_one_worker(num_workers):
    out = ranks.outcomes(SIZE, broken_data, num_workers, timeout_s=60)
    assert out[1].kind == "OSError"
    assert "paceline: worker 1 could not load its share of step" in out[1].error
    for rank in (0, 2):
        assert out[rank].kind == "PeerLost"
        assert "worker 1" in out[rank].error


def poisoned(value):
    train(points(), poison=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_on_one_rank(value):
    out = ranks.outcomes(SIZE, poisoned, value, timeout_s=60)
    for one in out:  # every worker says the same
        assert one.kind == "NonFiniteError"
        assert "that of worker 1 was NaN or infinite at step 5" in one.error


def disagree(field):
    odd = os.environ["RANK"] == "2"
    if field == "seed":
        paceline.init(timeout_s=15, seed=5 if odd else 1)
    elif field == "balance":
        paceline.init(timeout_s=15, balance="dbs" if odd else "affine")
    pace = paceline.init(timeout_s=15) if field not in ("seed", "balance") else None
    if field == "length":
        pace.loader(points(99 if odd else 100), 10)
    elif field == "batch_size":
        pace.loader(points(), 11 if odd else 10)
    elif field == "fingerprint":
        pace.loader(points(seed=3 if odd else 1), 10)
    elif field == "first_order":
        generator = torch.Generator().manual_seed(7 if odd else 1)
        pace.loader(points(), 10, sampler=RandomSampler(points(), generator=generator))


@pytest.mark.parametrize("field", ["seed", "balance", "length", "batch_size", "fingerprint", "first_order"])
def test_ranks_that_disagree_are_refused_by_name(field):
    for one in ranks.outcomes(SIZE, disagree, field):
        assert one.kind == "DisagreementError"
        assert f"worker 2 has {field}=" in one.error


def order_drifts():
    """A sampler that is equal in the first epoch only."""

    class Drifting:
        def __iter__(self):
            torch.manual_seed(0 if not hasattr(self, "used") else int(os.environ["RANK"]))
            self.used = True
            return iter(torch.randperm(60).tolist())

    train(points(60), sampler=Drifting())


def test_a_sampler_that_comes_to_differ_is_caught_at_the_epoch():
    for one in ranks.outcomes(SIZE, order_drifts):
        assert one.kind == "DisagreementError"
        assert "order of samples" in one.error


def bad(what):
    if what == "unknown policy":
        paceline.init(balance="afine")
    pace = paceline.init(timeout_s=15)
    if what == "empty":
        pace.loader(points(0), 4)
    elif what == "iterable":
        pace.loader(Stream(), 4)
    elif what == "zero batch":
        pace.loader(points(), 0)
    elif what == "drop all":
        pace.loader(points(5), 10, drop_last=True)
    elif what == "own batch_sampler":
        pace.loader(points(), 4, batch_sampler=[[0]])
    elif what == "out of order":
        pace.loader(points(), 4, in_order=False)
    elif what == "nothing to train":
        pace.wrap(nn.Linear(2, 2).requires_grad_(False), None)
    elif what == "no parameters":
        pace.wrap(nn.ReLU(), None)
    elif what == "wrapped twice":
        pace.wrap(pace.wrap(mlp(), None), None)
    elif what == "ddp in ddp":
        from torch.nn.parallel import DistributedDataParallel

        pace.wrap(DistributedDataParallel(mlp()), None)
    elif what == "two loaders":
        pace.loader(points(), 4)
        pace.loader(points(), 4)
    elif what == "device":
        paceline.init(device="gpu0")
    elif what == "no such device" and not torch.cuda.is_available():
        paceline.init(device="cuda")
    elif what == "count":
        pace.evaluate(lambda batch: {"count": 1}, points(4))
    elif what == "caps":
        paceline.init(max_local_batch=[8, 8, 8, 8, 8]).loader(points(), 4)
    elif what == "accumulate":
        pace.loader(points(), 4, accumulate=0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unknown policy", "unknown balance policy 'afine': did you mean 'affine'?"),
        ("empty", "the dataset must not be empty"),
        ("iterable", "needs a map-style dataset"),
        ("zero batch", "batch_size is the global batch and must be a whole number, at least 1; got 0"),
        ("drop all", "batch_size=10 for 5 samples, which leaves no step at all"),
        ("own batch_sampler", "batch_sampler= cannot be given"),
        ("out of order", "in_order=False cannot be given"),
        ("nothing to train", "at least one trainable parameter: Linear has none"),
        ("no parameters", "at least one trainable parameter: ReLU has none"),
        ("wrapped twice", "one model per pace"),
        ("ddp in ddp", "this one is in DistributedDataParallel already"),
        ("two loaders", "one training loader per pace"),
        ("device", "device must be a torch device"),
        ("no such device", "this worker sees no CUDA device"),
        ("count", "fn must not return 'count'"),
        ("caps", "got 5 numbers for 1 workers"),
        ("accumulate", "accumulate must be at least 1"),
    ],
)
def test_mistakes(what, message):
    if what == "no such device" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    out = ranks.outcomes(1, bad, what)
    assert out[0].kind == "ConfigError"
    assert message in out[0].error


def stuck():
    """Worker 1 hangs in its loop: the others must not."""
    pace = paceline.init(timeout_s=4)
    model = pace.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), None)
    for x, y in pace.loader(points(120), 12):
        if pace.rank == 1 and pace._total.step == 3:
            time.sleep(14)
        F.cross_entropy(model(x), y).backward()


def test_a_stuck_worker_is_named_with_what_it_was_doing():
    out = ranks.outcomes(SIZE, stuck, timeout_s=45)
    for rank in (0, 2):
        assert out[rank].kind == "PeerTimeout"
        assert "worker 1" in out[rank].error
        assert "is alive but has not arrived: at step 3, computing" in out[rank].error


def plan_disagreement():
    """A worker whose arithmetic differs is caught by the digest."""
    from paceline.policies.balance import Affine, DeadBand

    pace = paceline.init(timeout_s=15, replan_every=2)
    model = pace.wrap(mlp(), None)
    loader = pace.loader(points(), 12)
    if pace.rank == 2:
        from paceline.policies.balance import Fixed
        from paceline.runtime.plans import Plan

        coordinator = loader.coordinator
        original = coordinator._decide

        def differs(rows, step):
            original(rows, step)
            coordinator.book.add(Plan(step + 50, Fixed((1, 2, 3)), Fixed((1, 2, 3)).init(3), coordinator._limits, 24))

        coordinator._decide = differs
    assert isinstance(pace.settings.policy, DeadBand)
    assert isinstance(pace.settings.policy.inner, Affine)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()


def test_plans_that_differ_are_caught_by_name():
    for one in ranks.outcomes(SIZE, plan_disagreement):
        assert one.kind == "DisagreementError"
        assert "workers [2] hold another one" in one.error
