"""Promise 1: the update equals that of one process on the joined global batch, whatever the split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.runtime.order import Shuffled
from tests import ranks
from tests.nets import flat, mlp, points

SIZE = 3
LENGTH, BATCH = 50, 16  # a short last batch of 2: one of three workers idles there


class Branchy(nn.Module):
    """Has a frozen layer and one that only some batches use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.a, self.b, self.never = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.frozen(x))
        return self.a(x) + (self.b(x) if self.training else 0)


def loss_of(model, x, y):
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def plain(model, optimizer, scheduler, x, y):
    loss_of(model, x, y).backward()


def clipped(model, optimizer, scheduler, x, y):
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def scheduled(model, optimizer, scheduler, x, y):
    loss_of(model, x, y).backward()
    scheduler.step()


CASES = {
    "sgd momentum and weight decay": (
        mlp,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2),
        plain,
        {},
    ),
    "adamw": (mlp, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=1e-2), plain, {}),
    "clipping": (mlp, lambda p: torch.optim.SGD(p, 0.5), clipped, {}),
    "scheduler": (mlp, lambda p: torch.optim.SGD(p, 0.1), scheduled, {}),
    "double precision": (lambda: mlp().double(), lambda p: torch.optim.SGD(p, 0.1), plain, {}),
    "many buckets": (lambda: mlp(width=300), lambda p: torch.optim.SGD(p, 0.1), plain, {"bucket_cap_mb": 0.05}),
    "static graph": (mlp, lambda p: torch.optim.SGD(p, 0.1), plain, {"static_graph": True}),
    "gradient as bucket view": (mlp, lambda p: torch.optim.SGD(p, 0.1), plain, {"gradient_as_bucket_view": True}),
    "frozen and unused": (
        Branchy,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        plain,
        {"find_unused_parameters": True},
    ),
}


def train(name, balance, epochs=2):
    make, make_optimizer, body, ddp = CASES[name]
    pace = paceline.init(balance=balance, timeout_s=20)
    model = make()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model = pace.wrap(model, optimizer, **ddp)
    loader = pace.loader(points(LENGTH), BATCH)
    for _ in range(epochs):
        for x, y in loader:
            body(model, optimizer, scheduler, x, y)
            optimizer.step()
            optimizer.zero_grad()
    out = flat(model.module)
    pace.close()
    return out


def train_all(balance):
    return {name: train(name, balance) for name in CASES}


@pytest.fixture(scope="module")
def one_process():
    return ranks.run(1, train_all, "equal", timeout_s=100)[0]


@pytest.mark.parametrize("balance", ["fixed:1,2,5", "affine", "equal"])
def test_any_split_gives_what_one_process_gives(balance, one_process):
    results = ranks.run(SIZE, train_all, balance, timeout_s=100)
    for name in CASES:
        for rank in range(SIZE):
            torch.testing.assert_close(
                results[rank][name], one_process[name], rtol=1e-5, atol=1e-6, msg=f"{name}, rank {rank}"
            )
            assert torch.equal(results[rank][name], results[0][name])


def plain_mean(balance):
    """The plain mean of `dp` on a split that is not equal."""
    from paceline.policies.balance.rule import EpochRule, RuleState

    class Skewed(EpochRule):
        def init(self, num_workers):
            return RuleState((0.1, 0.2, 0.7), (0.0,) * num_workers)

    pace = paceline.init(balance=Skewed("dp", "mean" if balance == "dp" else "share", "compute"), timeout_s=20)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(30), 30)
    for x, y in loader:
        loss_of(model, x, y).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()]), loader.split


def test_dp_is_the_plain_mean_and_edp_the_weighted_one():
    mean, split = ranks.run(SIZE, plain_mean, "dp")[0]
    weighted, _ = ranks.run(SIZE, plain_mean, "edp")[0]
    assert split == (3, 6, 21)
    model = mlp()
    indices = Shuffled(30, 0).indices(0, 0, 30)
    x, y = (tensor[indices] for tensor in points(30).tensors)
    parts, begin = [], 0
    for count in split:
        model.zero_grad()
        loss_of(model, x[begin : begin + count], y[begin : begin + count]).backward()
        parts.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        begin += count
    torch.testing.assert_close(mean, sum(parts) / 3, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        weighted, sum(part * count / 30 for part, count in zip(parts, split, strict=True)), rtol=1e-5, atol=1e-7
    )


def accumulated(balance, accumulate):
    pace = paceline.init(balance=balance, timeout_s=20, replan_every=2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(64), 8, accumulate=accumulate, drop_last=True)
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            if number % 4 < 3:
                with model.no_sync():
                    (loss_of(model, x, y) / 4).backward()
            else:
                (loss_of(model, x, y) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
    return flat(model.module), [plan.start for plan in loader.coordinator.book.plans]


def test_accumulation_in_equal_micro_batches():
    alone = ranks.run(1, accumulated, "equal", 4)[0][0]
    for balance in ("affine", "fixed:1,2,5"):
        result, starts = ranks.run(SIZE, accumulated, balance, 4)[0]
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)
        assert all(start % 4 == 0 for start in starts)


def uneven_accumulation():
    pace = paceline.init(balance="fixed:1,2,5", timeout_s=20)
    model = pace.wrap(mlp(), None)
    loader = pace.loader(points(11), 8)
    first, last = iter(loader), None
    x, y = next(first)
    with model.no_sync():
        loss_of(model, x, y).backward()
    x, y = next(first)
    last = loss_of(model, x, y)
    last.backward()


def test_accumulating_unequal_shares_is_refused():
    out = ranks.outcomes(SIZE, uneven_accumulation)
    assert all("must come from equal shares" in one.error for one in out)
    assert all("accumulate=2" in one.error for one in out)


def with_amp(balance):
    """bf16 autocast, and fp16-style loss scaling on the CPU."""
    pace = paceline.init(balance=balance, timeout_s=20)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    loader = pace.loader(points(48), 16)
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, x, y)
            if epoch == 1 and number == 0 and (pace.rank == pace.size - 1):
                loss = loss * float("inf")  # an overflow on one rank
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return flat(model.module), scaler.get_scale()


def test_autocast_and_grad_scaler():
    alone, scale = ranks.run(1, with_amp, "equal")[0]
    results = ranks.run(SIZE, with_amp, "fixed:1,2,5")
    for result, their_scale in results:
        assert torch.isfinite(result).all()  # the overflow was skipped on every worker
        assert their_scale == scale
        torch.testing.assert_close(result, alone, rtol=0, atol=5e-3)  # bf16 rounds by batch shape
        assert torch.equal(result, results[0][0])


def half_buckets(balance):
    pace = paceline.init(balance=balance, timeout_s=20)
    model = mlp().bfloat16()
    model = pace.wrap(model, None)
    for x, y in pace.loader(points(24), 24):
        loss_of(model, x.bfloat16(), y).backward()
    return torch.cat([p.grad.float().reshape(-1) for p in model.parameters()])


def test_half_precision_gradients_are_summed_in_fp32():
    alone = ranks.run(1, half_buckets, "equal")[0]
    for result in ranks.run(SIZE, half_buckets, "fixed:1,2,5"):
        torch.testing.assert_close(result, alone, rtol=0.05, atol=2e-2)


def with_batch_norm():
    pace = paceline.init(balance="fixed:1,2,5", timeout_s=20)
    torch.manual_seed(pace.rank)  # ranks start apart; wrap makes them equal
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    means = []
    for x, y in pace.loader(points(64), 32):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(model.module[1].running_mean.clone())
    evaluated = pace.evaluate(
        lambda batch: {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum")}, points(30)
    )
    return flat(model.module), means, model.module[1].running_mean.clone(), evaluated


def test_buffers_come_from_worker_0_as_in_ddp():
    results = ranks.run(SIZE, with_batch_norm)
    assert all(torch.equal(result[0], results[0][0]) for result in results)
    assert not torch.equal(results[0][1][-1], results[1][1][-1])  # between syncs each has its own
    assert all(torch.equal(result[2], results[0][1][-1]) for result in results)  # evaluate takes worker 0's
    assert all(result[3] == results[0][3] for result in results)


def with_frozen_statistics():
    """The batch norm is frozen halfway: from there on its running statistics enter training, and must be worker 0's."""
    pace = paceline.init(balance="fixed:1,2,5", timeout_s=20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    sent = []
    original = model._paceline_comm.naming
    model._paceline_comm.naming = lambda what: sent.append(what) or original(what)
    counts = []
    for step, (x, y) in enumerate(pace.loader(points(64), 16)):
        if step == 2:
            model.module[1].eval()
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(sum("broadcast of buffers" in what for what in sent))
    return counts, model.module[1].running_mean.clone()


def test_frozen_statistics_are_worker_0s_in_training_too():
    results = ranks.run(SIZE, with_frozen_statistics)
    for counts, mean in results:
        assert counts == [0, 0, 1, 2]
        assert torch.equal(mean, results[0][1])


def sync_batch_norm(balance):
    """torch allows SyncBatchNorm on CUDA only; on the CPU it says so."""
    pace = paceline.init(balance=balance, timeout_s=20)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    model = pace.wrap(model, None)
    for x, y in pace.loader(points(32), 32):
        loss_of(model, x, y).backward()


def test_sync_batch_norm_needs_cuda():
    out = ranks.outcomes(2, sync_batch_norm, "equal")
    assert all("SyncBatchNorm layers only work with GPU modules" in one.error for one in out)


def parts_by_hand():
    """Hook, sampler and meter in a loop of one's own, without a Pace."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    comm = paceline.TorchComm(torch.device("cpu"), None, 20.0)
    meter = paceline.Meter()
    total = paceline.WeightedSum(comm, meter)
    model = DistributedDataParallel(mlp())
    total.attach(model)
    split = (3, 5, 8)
    sampler = paceline.PlanSampler(Shuffled(48, 0), 16, rank=comm.rank, cut=lambda step, joined: split)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    meter.fetch()
    for step, (x, y) in enumerate(DataLoader(points(48), batch_sampler=sampler)):
        meter.batch(step, len(x))
        total.weigh(len(x) / 16, step)
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.updated()
        meter.fetch()
    times = meter.take()
    del model
    comm.close(graceful=True)
    return [times_.samples for times_ in times], all(t.compute_s > 0 and t.comm_s >= 0 for t in times)


def test_the_parts_one_by_one():
    results = ranks.run(SIZE, parts_by_hand)
    assert [samples for samples, _ in results] == [[3] * 3, [5] * 3, [8] * 3]
    assert all(timed for _, timed in results)
