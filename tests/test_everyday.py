"""Things ordinary scripts do that a distributed library can get wrong."""

from __future__ import annotations

from collections import UserDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import LoopbackWorld
from paceline.policies.balance import Affine, Bounds, EveryNSteps
from paceline.runtime.batches import each_tensor, num_samples, to_device
from paceline.runtime.hook import WeightedSum
from tests import ranks
from tests.nets import flat, mlp, points

SIZE = 3


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


def peek(balance):
    """Worker 0 alone looks at a batch before the loop."""
    pace = paceline.init(balance=balance, timeout_s=15)
    model = pace.wrap(mlp(), None)
    loader = pace.loader(points(120), 12)
    if pace.is_main:
        next(iter(loader))
    for _ in range(2):
        for x, y in loader:
            loss_of(model, x, y).backward()


@pytest.mark.parametrize("balance", ["equal", "affine"])
def test_a_loop_on_one_worker_alone_is_caught(balance):
    first, *others = ranks.outcomes(SIZE, peek, balance)
    assert first.kind == "DisagreementError"  # it is a step ahead, so it is the first to see
    assert "worker 0 is at step" in first.error
    assert "iterate over the loader alike" in first.error
    assert {one.kind for one in others} <= {"DisagreementError", "PeerLost"}


def accumulate_by_epoch(balance):
    """Ten batches an epoch in groups of four, counted from its start; the last two are dropped."""
    pace = paceline.init(balance=balance, timeout_s=15, replan_every=2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(100), 10, accumulate=4)
    for _ in range(4):
        for number, (x, y) in enumerate(loader):
            if number % 4 == 3:
                (loss_of(model, x, y) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with model.no_sync():
                    (loss_of(model, x, y) / 4).backward()
        optimizer.zero_grad()
    return flat(model.module)


def test_accumulation_when_the_epoch_is_no_multiple():
    alone = ranks.run(1, accumulate_by_epoch, "equal")[0]
    for result in ranks.run(SIZE, accumulate_by_epoch, "affine"):
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)


def frozen_part():
    """A part that stays in eval mode, evaluation in mid-epoch, and a policy with bounds of its own."""
    pace = paceline.init(balance=Bounds(Affine(), cap=12), timeout_s=15)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].eval()
    model = pace.wrap(model, None)
    counts = []
    for number, (x, y) in enumerate(pace.loader(points(120), 24)):
        loss_of(model, x, y).backward()
        if number % 2:
            counts.append(pace.evaluate(lambda batch: {"n": len(batch[0])}, points(500))["n"])
    return model.training, model.module[0].training, model.module[1].training, counts


def test_evaluation_in_mid_epoch_leaves_modes_as_they_were():
    assert ranks.run(SIZE, frozen_part) == [(True, True, False, [500.0, 500.0])] * SIZE


def ddp_habits():
    """set_epoch on the sampler, as scripts written for DistributedSampler do."""
    pace = paceline.init(timeout_s=15)
    loader = pace.loader(points(20), 20)
    firsts = []
    for epoch in (5, 6, 9):
        loader.sampler.set_epoch(epoch)
        for x, _ in loader:
            firsts.append(x[0])
    return firsts


def test_set_epoch_on_the_sampler():
    from paceline.runtime.order import Shuffled

    x = points(20).tensors[0]
    expected = [x[Shuffled(20, 0).indices(epoch, 0, 1)[0]] for epoch in (5, 6, 9)]
    for found, wanted in zip(ranks.run(1, ddp_habits)[0], expected, strict=True):
        assert torch.equal(found, wanted)


def resume(path, save, **settings):
    pace = paceline.init(timeout_s=15, **settings)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(240), 24)
    if not save:
        pace.load(path)
    used = []
    for x, y in loader:
        used.append(loader.split)
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if save and loader.step == 5:
            pace.save(path)
            break
    return used, pace._total.samples


@pytest.mark.parametrize(
    "settings",
    [{"max_local_batch": 9}, {"replan_every": 7}, {"balance": EveryNSteps(Affine(), 5)}, {"balance": "dbs"}],
    ids=["lower cap", "another window", "another wrapper", "another policy"],
)
def test_resume_under_other_settings(tmp_path, settings):
    path = str(tmp_path / "c.ckpt")
    ranks.run(SIZE, partial(resume, path, True, replan_every=4))
    for used, _ in ranks.run(SIZE, partial(resume, path, False, **settings)):
        assert len(used) == 5
        assert all(max(split) <= settings.get("max_local_batch", 24) for split in used)


def own_error():
    """A user's error that happens to speak of connections."""

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x):
            raise RuntimeError("skip connection: expected 64 channels")

    pace = paceline.init(timeout_s=15)
    pace.wrap(Broken(), None)(torch.zeros(1, 8))


def test_a_users_own_error_stays_his_own():
    (out,) = ranks.outcomes(1, own_error)
    assert out.kind == "RuntimeError"
    assert "skip connection" in out.error


def lonely_save(path):
    pace = paceline.init(timeout_s=3)
    pace.wrap(mlp(), None)
    if pace.is_main:
        pace.save(path)
    else:
        import time

        time.sleep(8)


def test_saving_on_one_worker_alone_says_what_is_wrong(tmp_path):
    out = ranks.outcomes(2, lonely_save, str(tmp_path / "c.ckpt"))
    assert out[0].kind == "PeerTimeout"
    assert "saving, which every worker must take part in" in out[0].error


def recover(path):
    """After a non-finite gradient: back to the checkpoint, in the same process."""
    pace = paceline.init(timeout_s=15)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(240), 12)
    pace.save(path)
    caught = 0
    while loader.epoch < 1:
        try:
            for x, y in loader:
                loss = loss_of(model, x, y)
                if not caught and pace.rank == 1 and loader.step == 6:
                    loss = loss * float("nan")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        except paceline.NonFiniteError:
            caught += 1
            pace.load(path)
    return caught, bool(torch.isfinite(flat(model.module)).all())


def test_going_back_after_a_non_finite_gradient(tmp_path):
    assert ranks.run(2, recover, str(tmp_path / "c.ckpt")) == [(1, True)] * 2


def test_batches_of_other_kinds_keep_their_kind():
    class Encoding(UserDict):
        pass

    batch = Encoding(ids=torch.ones(3), names=["a", "b", "c"])
    doubled = each_tensor(batch, lambda tensor: tensor * 2)
    assert isinstance(doubled, Encoding)
    assert doubled["ids"].tolist() == [2, 2, 2]
    assert batch["ids"].tolist() == [1, 1, 1]
    assert num_samples([{"x": torch.tensor(1.0)}, torch.zeros(4, 2)]) == 4

    class Moves:
        def to(self, device):
            return ("moved", device)

    meta = torch.device("meta")
    assert to_device(Moves(), meta) == ("moved", meta)
    assert to_device([torch.zeros(2)], meta)[0].device == meta


def test_weights_at_the_outputs_count_once():
    total = WeightedSum(LoopbackWorld(2).comm(0))
    total.weigh(0.75)
    weight = torch.ones(1, requires_grad=True)
    features = weight * 2
    logits = features * 3
    first, second = total.scale_outputs((features, logits))
    (first.sum() + second.sum()).backward()
    assert weight.grad.item() == pytest.approx(1.5 * (2 + 6))  # 2 n w_i times the plain gradient, on both paths
    with pytest.raises(paceline.PacelineError, match="must return tensors"):
        total.scale_outputs(object())


def with_little(settings, batch=8):
    pace = paceline.init(balance="fixed:1,100", timeout_s=30, **settings)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(40), batch)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loader.split


def test_batch_norm_gets_several_samples():
    assert ranks.run(2, with_little, {}) == [(2, 6)] * 2
    assert ranks.run(2, with_little, {}, 40) == [(8, 32)] * 2  # few are allowed, but train badly
    assert ranks.run(2, with_little, {"max_local_batch": [5, 100]}, 40) == [(5, 35)] * 2
    asked = ranks.outcomes(2, with_little, {"min_local_batch": 1})  # whoever asks for one gets one
    assert "Expected more than 1 value per channel" in asked[0].error
