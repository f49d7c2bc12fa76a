"""The data path on real ranks: exactly once, whatever loads the data."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import paceline
from paceline.runtime.order import Shuffled
from tests import ranks
from tests.nets import mlp, points

SIZE = 3


class Numbered(Dataset):
    """Item i is i, with features to train on."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((8,), index / self.count), index % 3, index


def name_ids(items):
    x, y, ids = zip(*items, strict=True)
    return {"x": torch.stack(x), "y": torch.tensor(y), "ids": list(ids)}


class Scripted:
    """A clock of made-up times, the same in every run: plans change often, and always the same way."""

    def __init__(self, rank, seed=0):
        self.random = random.Random(1000 * seed + rank)
        self.scale = 1 + rank  # unlike on the whole, and noisy
        self.now = 0.0

    def mark(self):
        self.now += self.scale * self.random.uniform(0.01, 1.0)
        return self.now

    def passed(self, mark):
        return True

    def between(self, start, end):
        return end - start


def scripted_pace(**settings):
    """A Pace whose step times are scripted."""
    from paceline.comm import TorchComm
    from paceline.config import Settings
    from paceline.runtime.meter import Meter
    from paceline.runtime.pace import Pace

    comm = TorchComm(torch.device("cpu"), None, 20.0)
    return Pace(comm, Settings(**settings), torch.device("cpu"), meter=Meter(clock=Scripted(comm.rank)))


def used(epochs, loader_settings, settings):
    pace = scripted_pace(**settings)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model = pace.wrap(model, optimizer)
    if loader_settings.get("sampler") == "backwards":
        loader_settings = {**loader_settings, "sampler": list(range(100, -1, -1))}
    loader = pace.loader(Numbered(101), 16, collate_fn=name_ids, **loader_settings)
    out, splits = [], set()
    for _ in range(epochs):
        ids = []
        for batch in loader:
            splits.add(loader.split)
            ids.append(batch["ids"] if pace._total.samples else [])
            F.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        out.append(ids)
    return out, len(splits), len(loader)


@pytest.mark.parametrize(
    ("loader_settings", "settings", "num_splits"),
    [
        ({}, {"replan_every": 1}, 3),
        ({"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}, {"replan_every": 2}, 3),
        ({"drop_last": True}, {"replan_every": 2, "granularity": 2}, 2),
        ({"sampler": "backwards"}, {"replan_every": 2, "max_local_batch": 7}, 3),
        ({"shuffle": False}, {"replan_every": 3, "balance": "dbs"}, 2),
    ],
)
def test_each_sample_once_through_replans(loader_settings, settings, num_splits):
    results = ranks.run(SIZE, used, 3, loader_settings, settings)
    per_epoch = 96 if loader_settings.get("drop_last") else 101
    for epoch in range(3):
        by_step = zip(*(result[0][epoch] for result in results), strict=True)
        sequence = [index for parts in by_step for part in parts for index in part]
        assert len(sequence) == per_epoch
        assert max(Counter(sequence).values()) == 1
        if not loader_settings.keys() & {"sampler", "shuffle"}:
            assert sequence == Shuffled(101, 0).indices(epoch, 0, per_epoch)
        elif "sampler" in loader_settings:
            assert sequence == list(range(100, -1, -1))
        else:
            assert sequence == list(range(101))
    assert all(result[1] >= num_splits for result in results)  # plans did change
    assert {result[2] for result in results} == {6 if loader_settings.get("drop_last") else 7}


def small_batches():
    """A global batch smaller than the number of workers: somebody idles, the update is still exact."""
    pace = paceline.init(balance="equal", timeout_s=20)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    seen = []
    for x, y in pace.loader(points(7), 2):
        seen.append(pace._total.samples)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), seen


def test_fewer_samples_than_workers():
    alone = ranks.run(1, small_batches)[0][0]
    results = ranks.run(SIZE, small_batches)
    assert [result[1] for result in results] == [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    for result, _ in results:
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)


def larger_than_dataset():
    pace = paceline.init(timeout_s=20)
    model = pace.wrap(mlp(), None)
    loader = pace.loader(points(10), 500)
    sizes = []
    for _ in range(2):
        for x, y in loader:
            sizes.append(len(x))
            F.cross_entropy(model(x), y).backward()
    return len(loader), sizes


def test_a_batch_larger_than_the_dataset_is_one_short_step():
    results = ranks.run(SIZE, larger_than_dataset)
    assert [result[0] for result in results] == [1] * SIZE
    for step in range(2):
        assert sum(result[1][step] for result in results) == 10


def leave_early():
    pace = paceline.init(timeout_s=20)
    loader = pace.loader(Numbered(20), 4, collate_fn=name_ids)
    first = []
    for batch in loader:
        first += batch["ids"]
        break
    epoch_after_break = loader.epoch
    second = [index for batch in loader for index in batch["ids"]]
    loader.set_epoch(7)
    third = [index for batch in loader for index in batch["ids"]]
    return first, epoch_after_break, second, third, loader.epoch


def test_break_starts_the_next_epoch_and_set_epoch_chooses_one():
    first, epoch, second, third, at_end = ranks.run(1, leave_early)[0]
    order = Shuffled(20, 0)
    assert first == order.indices(0, 0, 4)
    assert epoch == 0  # a save right after the break would resume inside it
    assert second == order.indices(1, 0, 20)
    assert third == order.indices(7, 0, 20)
    assert at_end == 8


def evaluate_exactly():
    pace = paceline.init(balance="fixed:1,2,5", timeout_s=20)
    model = pace.wrap(mlp(), None)
    pace.loader(points(16), 8)
    seen = []

    def sums(batch):
        x, y, ids = batch
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.extend(ids.tolist())
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y, reduction="sum"), "correct": (logits.argmax(1) == y).sum()}

    totals = pace.evaluate(sums, Numbered(23), batch_size=4)
    assert model.training
    tiny = pace.evaluate(sums, Numbered(2))
    return totals, seen[:-2] if pace.size == 1 else seen, tiny["count"]


def test_evaluation_counts_each_sample_once():
    results = ranks.run(SIZE, evaluate_exactly)
    model, data = mlp(), Numbered(23)
    x = torch.stack([data[i][0] for i in range(23)])
    y = torch.tensor([data[i][1] for i in range(23)])
    with torch.no_grad():
        logits = model(x)
    for totals, _, tiny in results:
        assert totals["count"] == 23
        assert totals["correct"] == int((logits.argmax(1) == y).sum())
        assert totals["loss"] == pytest.approx(float(F.cross_entropy(logits, y, reduction="sum")), rel=1e-6)
        assert tiny == 2
    assert Counter(index for result in results for index in result[1]) == Counter(range(23)) + Counter(range(2))


def count_compilations():
    """torch.compile with batch sizes that keep changing."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    pace = scripted_pace(replan_every=1, min_local_batch=2)
    net = torch.compile(mlp(), backend=counter)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    model = pace.wrap(net, optimizer)
    loader = pace.loader(points(400), 40)
    sizes = set()
    for _ in range(2):
        for x, y in loader:
            sizes.add(len(x))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return counter.frame_count, len(sizes)


def test_compiled_models_do_not_recompile_at_each_plan():
    for compilations, sizes in ranks.run(2, count_compilations, timeout_s=100):
        assert sizes >= 5
        assert compilations <= 2  # once for the first size, once for any size


def compile_outside():
    pace = paceline.init(balance="fixed:1,3", timeout_s=20)
    model = torch.compile(pace.wrap(mlp(), None), backend="eager")
    for x, y in pace.loader(points(24), 24):
        F.cross_entropy(model(x), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_compiling_the_wrapped_model_is_exact_too():
    results = ranks.run(2, compile_outside, timeout_s=100)
    model = mlp()
    x, y = points(24).tensors
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(results[0], torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
