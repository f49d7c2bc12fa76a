"""Local training over a whole run: resume in mid-flight, faults, mixed use, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import LoopbackWorld
from paceline.errors import ConfigError
from paceline.events import EventLog, events_path, read
from paceline.policies.sync import Fixed, Overlap, Terms
from paceline.runtime.flat import Flat
from paceline.runtime.losses import Losses
from paceline.runtime.topology import by_label, declared
from tests import ranks
from tests.nets import flat, mlp, points

SIZE = 3


def update(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def run(sync, path, *, steps, save_at=None, resume=False, kind="sgd", nodes="2,1", balance="equal"):
    """Train up to `steps` steps; save after `save_at` of them and stop, or go on from what was saved."""
    pace = paceline.init(sync=sync, nodes=nodes, balance=balance, timeout_s=30)
    with pace:
        torch.manual_seed(7 + pace.rank)
        model = net()
        make = {"sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "adam": lambda p: torch.optim.AdamW(p, 1e-2)}
        optimizer = make[kind](model.parameters())
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(150), 24)
        if resume:
            pace.load(path)
        seen = []
        while True:
            for x, y in loader:
                update(model, optimizer, x, y)
                if loader.step == save_at:
                    pace.save(path)
                    return None
                if loader.step == steps:
                    with pace.consensus():
                        agreed = flat(model.module)
                    pace.settle()
                    return flat(model.module), model.module[2].running_mean.clone(), agreed, seen


@pytest.mark.parametrize(
    ("sync", "kind", "save_at"),
    [
        ("overlap:h=4,delay=3", "sgd", 6),  # under way
        ("overlap:h=4,delay=3,compress=int8,level=worker", "adam", 9),  # under way, in a second epoch
        ("overlap:h=5,delay=1", "adam", 3),  # in mid-round
        ("daso:warm_up=0", "sgd", 5),
        ("diloco:h=6,fragments=2,delay=2", "sgd", 4),
        ("local:h=5", "adam", 8),
        ("post-local:after=4,h=3", "sgd", 2),
    ],
)
def test_a_run_resumed_anywhere_ends_as_if_it_had_not_stopped(tmp_path, sync, kind, save_at):
    """To the last bit: sums are taken in the order of nodes, wherever a value lies."""
    path = str(tmp_path / "check.safetensors")

    def go(**how):
        return ranks.run(SIZE, _go, sync, path, kind, how)

    whole = go(steps=13)
    go(steps=13, save_at=save_at)
    resumed = go(steps=13, resume=True)
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])


def _go(sync, path, kind, how):
    return run(sync, path, kind=kind, **how)


def test_a_checkpoint_of_three_replicas_resumes_on_two_workers(tmp_path):
    path = str(tmp_path / "check.safetensors")
    ranks.run(SIZE, _go, "overlap:h=4,delay=3", path, "sgd", {"steps": 13, "save_at": 6, "nodes": "1,1,1"})
    results = ranks.run(2, _go, "overlap:h=4,delay=3", path, "sgd", {"steps": 13, "resume": True, "nodes": "1,1"})
    assert torch.equal(results[0][0], results[1][0])


def other_policy(path):
    return run("local:h=4", path, steps=13, resume=True)


def test_a_checkpoint_of_another_sync_policy_is_refused(tmp_path):
    path = str(tmp_path / "check.safetensors")
    ranks.run(SIZE, _go, "overlap:h=4,delay=3", path, "sgd", {"steps": 13, "save_at": 6})
    for one in ranks.outcomes(SIZE, other_policy, path):
        assert one.kind == "CheckpointError"
        assert "'overlap', this run 'local'" in one.error


def trained(sync, settings, folder):
    pace = paceline.init(sync=sync, timeout_s=20, run_dir=folder, **settings)
    with pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(240), 24)
        before = mean_loss(pace, model)
        for _ in range(4):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                pace.report(loss)
                optimizer.step()
                optimizer.zero_grad()
        return flat(model.module), before, mean_loss(pace, model)


def mean_loss(pace, model):
    sums = pace.evaluate(
        lambda batch: {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum")}, points(240)
    )
    return sums["loss"] / sums["count"]


def events(folder, kind):
    return [event for event in read(events_path(Path(folder), 0)) if event["type"] == kind]


@pytest.mark.parametrize(
    "sync", ["overlap", "overlap:compress=bf16", "daso:warm_up=1", "diloco:h=5", "local:steps=qsr"]
)
@pytest.mark.parametrize("balance", ["affine", "fixed:5,2,1"])
def test_together_with_balance(tmp_path, sync, balance):
    """Shares of unequal size, plans that change, and a cost model that measures."""
    results = ranks.run(SIZE, trained, sync, {"balance": balance, "nodes": "2,1"}, str(tmp_path))
    for result in results:
        assert torch.equal(result[0], results[0][0])
        assert result[2] < 0.7 * result[1]
    rounds = events(tmp_path, "round")
    assert rounds
    if balance == "fixed:5,2,1":
        expected = [5 / 8, 2 / 8, 1 / 8] if "local" in sync else [7 / 8, 1 / 8]
        assert all(one["weights"] == pytest.approx(expected, abs=0.05) for one in rounds)
    assert events(tmp_path, "topology")[0]["members"] == [[0, 1], [2]]
    assert all(one["num_bytes"] > 0 for one in rounds)


def nan_in_one(folder):
    pace = paceline.init(sync="overlap:h=4,delay=2", nodes="1,1,1", balance="equal", timeout_s=20, run_dir=folder)
    with pace:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(480), 24)
        finite = []
        for step, (x, y) in enumerate(loader):
            if pace.rank == 1 and step == 6:
                x = x * float("nan")
            update(model, optimizer, x, y)
            finite.append(bool(torch.isfinite(flat(model.module)).all()))
        return finite, flat(model.module)


def test_a_nan_stays_with_its_worker_which_starts_again(tmp_path):
    results = ranks.run(SIZE, nan_in_one, str(tmp_path))
    assert all(results[0][0])
    assert all(results[2][0])
    assert not all(results[1][0])
    assert results[1][0][-1]
    assert all(torch.equal(result[1], results[0][1]) for result in results)
    (left,) = events(tmp_path, "left-out")
    assert left["replicas"] == [1]
    assert "not finite" in left["reason"]


def scaled():
    """A GradScaler skips the optimizer on one worker alone: it must keep step with the others."""
    pace = paceline.init(sync="local:h=3", nodes="1,1,1", balance="equal", timeout_s=20)
    with pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = pace.wrap(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in enumerate(pace.loader(points(240), 24)):
            loss = F.cross_entropy(model(x), y)
            if pace.rank == 2 and step == 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return flat(model.module)


def test_a_skipped_update_keeps_workers_in_step():
    results = ranks.run(SIZE, scaled)
    assert all(torch.equal(result, results[0]) for result in results)


def killed(folder):
    pace = paceline.init(sync="overlap:h=2,delay=1", nodes="2,1", balance="equal", timeout_s=6, run_dir=folder)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    for step, (x, y) in enumerate(pace.loader(points(2400), 24)):
        if pace.rank == 2 and step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        update(model, optimizer, x, y)
        if step == 5:
            pace.save(f"{folder}/check")


def test_a_worker_that_dies_in_mid_exchange_is_named_and_the_checkpoint_stays(tmp_path):
    out = ranks.outcomes(SIZE, killed, str(tmp_path), timeout_s=60)
    for rank in (0, 1):
        assert out[rank].kind in ("PeerLost", "PeerTimeout")
        assert "worker 2" in out[rank].error
    resumed = ranks.run(SIZE, _from, str(tmp_path / "check"))
    assert resumed == [6] * SIZE


def _from(path):
    pace = paceline.init(sync="overlap:h=2,delay=1", nodes="2,1", balance="equal", timeout_s=20)
    with pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(2400), 24)
        pace.load(path)
        return loader.step


class Masked(nn.Module):
    """Batch normalisation, and buffers that never change: a mask of infinities, a float64 table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 1 / 3]))
        self.register_buffer("table", torch.tensor([1 / 3], dtype=torch.float64))

    def forward(self, x):
        return self.body(x)


def with_buffers(sync, spoil):
    pace = paceline.init(sync=sync, nodes="2,1", balance="fixed:3,2,1", timeout_s=20)
    with pace:
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model = pace.wrap(model, optimizer)
        own = []
        loader = pace.loader(points(240), 48)
        for _ in range(3):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                if spoil and pace.rank == 1 and loader.step == 7:
                    model.module.body[1].running_var.fill_(float("nan"))
                own.append((model.module.body[1].running_mean.clone(), model.module.body[1].running_var.clone()))
                optimizer.step()
                optimizer.zero_grad()
        inner = model.module
        return own, [inner.body[1].running_mean.clone(), inner.body[1].running_var.clone(), inner.mask, inner.table]


@pytest.mark.parametrize("sync", ["overlap:h=2,delay=1", "daso:warm_up=1", "local:h=5", "overlap:h=3,warm_up=4"])
@pytest.mark.parametrize("spoil", [False, True])
def test_buffers_are_averaged_over_workers_and_constants_stay(sync, spoil):
    results = ranks.run(SIZE, with_buffers, sync, spoil)
    for result in results:
        for mine, theirs in zip(result[1], results[0][1], strict=True):
            assert torch.equal(mine, theirs)
        assert bool((result[1][1] > 0).all())
        assert torch.equal(result[1][2], torch.tensor([0.0, float("-inf"), 1 / 3]))
        assert result[1][3].item() == 1 / 3
    if (
        sync == "local:h=5" and not spoil
    ):  # the epoch's last exchange is waited for: the mean over what workers had, by samples
        for part in (0, 1):
            mean = sum(
                w * result[0][-1][part].double() for w, result in zip((3 / 6, 2 / 6, 1 / 6), results, strict=True)
            )
            torch.testing.assert_close(results[0][1][part].double(), mean, rtol=1e-5, atol=1e-6)


def loaded_late():
    """Weights loaded after wrap are what replicas start from."""
    pace = paceline.init(sync="diloco:h=4", nodes="1,1,1", balance="equal", timeout_s=20)
    with pace:
        model = mlp(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        model = pace.wrap(model, optimizer)
        model.module.load_state_dict(mlp(seed=5).state_dict())
        for x, y in pace.loader(points(96), 24):
            update(model, optimizer, x, y)
        with pace.consensus(), pace.consensus():
            agreed = flat(model.module)
            with pytest.raises(ConfigError, match="save after it"):
                pace.state_dict()
        pace.settle()
        return agreed, flat(model.module)


def test_weights_loaded_after_wrap_are_the_anchor():
    for agreed, settled in ranks.run(SIZE, loaded_late):
        assert torch.equal(agreed, flat(mlp(seed=5)))
        assert torch.equal(settled, flat(mlp(seed=5)))


def settled_twice():
    pace = paceline.init(sync="diloco:h=4", nodes="1,1,1", balance="equal", timeout_s=20)
    with pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = pace.wrap(model, optimizer)
        for x, y in pace.loader(points(96), 24):
            update(model, optimizer, x, y)
        before = flat(model.module)
        pace.settle()
        return before, flat(model.module)


def test_settling_moves_nothing_where_all_agree():
    for before, after in ranks.run(SIZE, settled_twice):
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)


def skipping(path):
    """Worker 2's GradScaler skips the very step after which everybody saves and evaluates."""
    pace = paceline.init(sync="local:h=4", nodes="1,1,1", balance="equal", timeout_s=15)
    with pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = pace.wrap(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        loader = pace.loader(points(240), 24)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if pace.rank == 2 and loader.step == 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if loader.step == 4:
                pace.save(path)
                pace.evaluate(lambda batch: {"n": len(batch[0])}, points(31))
            if loader.step == 6:
                break
        for x, y in loader:
            update(model, optimizer, x, y)
        return flat(model.module)


def test_a_skipped_update_does_not_hold_up_a_save(tmp_path):
    results = ranks.run(SIZE, skipping, str(tmp_path / "check"))
    assert all(torch.equal(result, results[0]) for result in results)


def by_function(sync):
    """pace.step, with gradients accumulated in halves and a part of the model unused."""
    pace = paceline.init(sync=sync, nodes="2,1", balance="equal", timeout_s=20)
    with pace:
        model = mlp()
        model[0].unused = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = pace.wrap(model, optimizer)
        for x, y in pace.loader(points(120), 24):
            pace.step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y))
            optimizer.step()
            optimizer.zero_grad()
        return flat(model.module)


def test_a_step_given_as_a_function():
    for sync in ("overlap:h=2,delay=1", "local:h=3"):
        results = ranks.run(SIZE, by_function, sync)
        assert all(torch.equal(result, results[0]) for result in results)


def momenta(state, accumulate):
    pace = paceline.init(sync=f"local:h=3,optimizer_state={state}", nodes="1,1,1", balance="equal", timeout_s=20)
    with pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(144 * accumulate), 24, accumulate=accumulate)
        for number, (x, y) in enumerate(loader, 1):
            closes = number % accumulate == 0
            with model.no_sync() if not closes else torch.enable_grad():
                F.cross_entropy(model(x), y).backward()
            if closes:
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([optimizer.state[p]["momentum_buffer"].reshape(-1) for p in model.module.parameters()])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_optimizer_state_is_kept_averaged_or_reset(accumulate):
    kept = ranks.run(SIZE, momenta, "keep", accumulate)
    assert not torch.equal(kept[0], kept[1])
    averaged = ranks.run(SIZE, momenta, "average", accumulate)
    assert all(torch.equal(one, averaged[0]) for one in averaged)
    assert bool(averaged[0].any())
    assert all(not bool(one.any()) for one in ranks.run(SIZE, momenta, "reset", accumulate))


def moved_on(path):
    """A settled checkpoint goes on under another policy."""
    pace = paceline.init(sync="local:h=4", nodes="2,1", balance="equal", timeout_s=20)
    with pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(2400), 24)
        pace.load(path)
        return loader.step, flat(model.module)


def settled_save(path):
    pace = paceline.init(sync="overlap:h=4,delay=1", nodes="2,1", balance="equal", timeout_s=20)
    with pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(2400), 24)
        for x, y in loader:
            update(model, optimizer, x, y)
            if loader.step == 6:
                pace.settle()
                pace.save(path)
                return flat(model.module)


def test_a_settled_checkpoint_goes_on_under_another_policy(tmp_path):
    saved = ranks.run(SIZE, settled_save, str(tmp_path / "check"))
    for step, values in ranks.run(SIZE, moved_on, str(tmp_path / "check")):
        assert step == 6
        assert torch.equal(values, saved[0])


# ------------------------------------------------------------------------------------------------------------- what is refused
def bad(what):
    settings = {"nodes": {"nodes": "2,2"}, "complex": {}, "sync batch norm": {}}.get(what, {})
    pace = paceline.init(sync="overlap:compress=int8", timeout_s=10, **settings)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if what == "no optimizer":
        pace.wrap(model)
    if what == "compress":
        pace.wrap(model, optimizer, compress="bf16")
    if what == "sync batch norm":
        pace.wrap(nn.Sequential(model, nn.SyncBatchNorm(3)), optimizer)
    if what == "unused":
        pace.wrap(model, optimizer, find_unused_parameters=True)
    if what == "complex":
        model.extra = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        pace.wrap(model, optimizer)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nodes", "nodes must name each of the 3 workers once: workers [3] do not exist"),
        ("no optimizer", "hangs on the optimizer's steps"),
        ("compress", "use sync='overlap:compress=bf16'"),
        ("sync batch norm", "use BatchNorm (its running statistics are averaged), or sync='allreduce'"),
        ("unused", "use pace.step(fn, batch)"),
        ("complex", "'extra' is torch.complex64. Freeze or convert it"),
    ],
)
def test_mistakes(what, message):
    for one in ranks.outcomes(SIZE, bad, what, timeout_s=40):
        assert one.kind == "ConfigError", one.error
        assert message in one.error


def test_topologies():
    assert declared("2,1", 3).members == ((0, 1), (2,))
    assert declared([[2, 0], [1]], 3).members == ((2, 0), (1,))
    assert by_label(["b", "a", "b"]).members == ((0, 2), (1,))
    for nodes, message in (
        ("1,1", "workers [2] are on no node"),
        ([[0, 1], [1, 2]], "workers [1] are on several nodes"),
        ("2,x", "numbers of workers"),
        ("3,0", "at least one worker"),
        ([[0, 1, 2], []], "a node has none"),
    ):
        with pytest.raises(ConfigError) as error:
            declared(nodes, 3)
        assert message in str(error.value)


def test_any_memory_format_is_copied_in_and_out():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    before = [p.detach().clone() for p in model.parameters()]
    both = Flat(model)
    values = both.empty()
    both.read(values, 0, len(values))
    assert both.length == sum(p.numel() for p in before)
    assert both.tail == 8
    both.write(torch.zeros_like(values), 0, len(values))
    assert all(not bool(p.any()) for p in model.parameters())
    both.add(values, 0, 50)
    both.add(values, 50, len(values))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_objects_with_settings():
    policy = Overlap(steps=Fixed(3), delay=1, terms=Terms(level="worker", compress="int8"))
    results = ranks.run(SIZE, trained, policy, {"balance": "equal", "nodes": "1,1,1"}, None)
    assert all(torch.equal(result[0], results[0][0]) for result in results)


def test_reported_losses_are_a_mean_over_samples_and_survive_a_resume(tmp_path):
    comm = LoopbackWorld(1).comm(0)
    log = EventLog(tmp_path / "log")
    losses = Losses(comm, log)
    losses.add(torch.tensor(2.0, requires_grad=True), 3)
    resumed = Losses(comm, EventLog(None))
    resumed.load(json.loads(json.dumps(losses.state())))
    for one in (losses, resumed):
        one.add(4.0, 1)
        assert one.close_over_all(0, 7) == 2.5
        assert one.close_over_all(1, 8) is None
    log.close()
    (event,) = read(tmp_path / "log")
    assert (event["loss"], event["samples"], event["step"]) == (2.5, 4, 7)
