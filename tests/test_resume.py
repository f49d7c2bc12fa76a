"""Save, kill, resume: the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.errors import CheckpointError
from paceline.events import events_path, read
from paceline.runtime import checkpoint
from paceline.runtime.order import Shuffled
from tests import ranks
from tests.nets import flat, points
from tests.test_loader import Numbered, name_ids, scripted_pace

SIZE = 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def train(
    path, epochs, *, save_at=None, kill=False, resume=False, seed=0, length=75, batch=16, policy="affine", num_workers=0
):
    """Train with a scripted clock: plans change often, and in the same way in every run."""
    from tests.test_loader import Scripted

    pace = scripted_pace(seed=seed, replan_every=2, min_local_batch=2, balance=policy)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(length), batch, num_workers=num_workers)
    torch.manual_seed(100 + pace.rank)  # dropout differs from worker to worker
    clock = pace._meter._clock
    if resume:
        clock.now, (version, internal, gauss) = checkpoint.read(Path(path))["extra"]["clock"][pace.rank]
        clock.random.setstate((version, tuple(internal), gauss))
        pace.load(path, scheduler=scheduler)
    assert isinstance(clock, Scripted)
    splits = []
    for _ in range(loader.epoch, epochs):
        for x, y in loader:
            splits.append((loader.step, pace._total.samples))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if loader.step == save_at:
                import json

                clocks = [
                    json.loads(t) for t in pace.comm.gather_text(json.dumps([clock.now, clock.random.getstate()]))
                ]
                pace.save(path, scheduler=scheduler, clock=clocks)
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
    return flat(model.module), model.module.state_dict(), splits


@pytest.mark.parametrize("save_at", [1, 4, 5, 8])
def test_killed_and_resumed_is_bit_identical(tmp_path, save_at):
    whole = ranks.run(SIZE, train, str(tmp_path / "w"), 3)
    path = str(tmp_path / "c.ckpt")
    from functools import partial

    killed = ranks.outcomes(SIZE, partial(train, path, 3, save_at=save_at, kill=True))
    assert [one.exit_code for one in killed] == [-9] * SIZE
    resumed = ranks.run(SIZE, partial(train, path, 3, resume=True))
    assert len({tuple(split) for _, _, split in whole}) > 1  # the split was not equal all along
    for rank in range(SIZE):
        assert torch.equal(resumed[rank][0], whole[rank][0])
        assert resumed[rank][2] == whole[rank][2][save_at:]
    for name, value in whole[0][1].items():
        assert torch.equal(resumed[0][1][name], value), name


def sequence(path, batches, *, resume, save):
    """Which samples are used, in global order, for some batches."""
    pace = paceline.init(balance="affine", timeout_s=20)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(Numbered(50), 8, collate_fn=name_ids)
    if resume:
        pace.load(path)
    out, epoch_at_start = [], loader.epoch
    while len(out) < batches:
        for batch in loader:
            out.append(batch["ids"] if pace._total.samples else [])
            F.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(out) == batches:
                break
    if save:
        pace.save(path)
    return out, epoch_at_start, flat(model.module)


@pytest.mark.parametrize(("before", "after", "at"), [(1, 3, 3), (3, 2, 5), (2, 3, 7)])  # 7 is exactly an epoch's end
def test_resume_on_another_number_of_workers(tmp_path, before, after, at):
    from functools import partial

    path = str(tmp_path / "c.ckpt")
    first = ranks.run(before, partial(sequence, path, at, resume=False, save=True))
    second = ranks.run(after, partial(sequence, path, 14 - at, resume=True, save=False))
    straight = ranks.run(1, partial(sequence, path, 14, resume=False, save=False))

    def joined(results):
        return [i for parts in zip(*(result[0] for result in results), strict=True) for part in parts for i in part]

    order = Shuffled(50, 0)
    assert joined(first) + joined(second) == order.indices(0, 0, 50) + order.indices(1, 0, 50)
    torch.testing.assert_close(second[0][2], straight[0][2], rtol=1e-5, atol=1e-6)


def load_with(path, **changes):
    values = {"seed": 0, "length": 75, "batch": 16, **changes}
    return train(path, 1, resume=True, **values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 74}, "length=75, this loader length=74"),
        ({"batch": 15}, "batch_size=16, this loader batch_size=15"),
        ({"seed": 4}, "the checkpoint has seed=0, this run seed=4"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, changes, message):
    from functools import partial

    path = str(tmp_path / "c.ckpt")
    ranks.run(1, partial(train, path, 1, save_at=2))
    out = ranks.outcomes(1, partial(load_with, path, **changes))
    assert out[0].kind == "CheckpointError"
    assert message in out[0].error


def other_data(path):
    pace = paceline.init(timeout_s=20)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    pace.wrap(model, optimizer)
    pace.loader(points(75, seed=9), 16)
    pace.load(path)


def damaged(path):
    pace = paceline.init(timeout_s=20)
    pace.load(path if pace.rank == 0 else path + ".gone")


def test_another_dataset_a_damaged_file_and_a_missing_one(tmp_path):
    from functools import partial

    path = tmp_path / "c.ckpt"
    ranks.run(2, partial(train, str(path), 1, save_at=2))
    out = ranks.outcomes(1, other_data, str(path))
    assert "a checkpoint resumes on the dataset it was made on: it has fingerprint=" in out[0].error
    out = ranks.outcomes(2, damaged, str(path))
    assert all("worker 1: there is no checkpoint" in one.error for one in out)
    path.write_bytes(path.read_bytes()[:-10])
    out = ranks.outcomes(2, damaged, str(path))
    assert all("worker 0:" in one.error and "truncated" in one.error for one in out)
    assert {one.kind for one in out} == {"CheckpointError"}


def save_nan(path):
    pace = paceline.init(timeout_s=20)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model = pace.wrap(model, optimizer)
    pace.save(path)
    with torch.no_grad():
        model.module[0].weight[0, 0] = float("nan")
    try:
        pace.save(path)
    except CheckpointError as error:
        return str(error)


def test_a_broken_model_does_not_overwrite_a_good_checkpoint(tmp_path):
    path = tmp_path / "c.ckpt"
    messages = ranks.run(2, save_nan, str(path))
    assert all("'0.weight' holds NaN or infinity; the checkpoint on disk is kept" in message for message in messages)
    assert torch.isfinite(checkpoint.read(path)["model"]["0.weight"]).all()


def save_nowhere(path):
    pace = paceline.init(timeout_s=20)
    pace.wrap(net(), None)
    try:
        pace.save(path)
    except CheckpointError as error:
        return str(error)


def test_a_place_that_cannot_be_written_fails_everywhere(tmp_path):
    (tmp_path / "file").write_text("")
    messages = ranks.run(2, save_nowhere, str(tmp_path / "file" / "c.ckpt"))
    assert all("cannot write the checkpoint" in message for message in messages)


def log_a_run(folder):
    pace = paceline.init(run_dir=folder, timeout_s=20, balance="affine")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(points(64), 16)
    for _ in range(3):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    pace.evaluate(lambda batch: {"n": len(batch[0])}, points(10))
    pace.save(folder + "/c.ckpt")


def test_the_event_log_tells_the_run_and_replays_to_the_same_plans(tmp_path):
    ranks.run(2, log_a_run, str(tmp_path))
    logs = [list(read(events_path(tmp_path, rank))) for rank in range(2)]
    kinds = [event["type"] for event in logs[0]]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert {"data", "plan", "window", "steps", "epoch", "evaluate", "state"} <= set(kinds)
    start = logs[0][0]
    assert start["config"]["balance"] == "affine"
    assert start["sources"]["run_dir"] == "argument"
    plans = [[(e["step"], e["start"], e["split"], e["reason"]) for e in log if e["type"] == "plan"] for log in logs]
    assert plans[0] == plans[1]  # no leader, no disagreement
    assert all(reason for *_, reason in plans[0])
    steps = [e for e in logs[1] if e["type"] == "steps"]
    assert sum(len(e["step"]) for e in steps) == 11  # 12 less the warm-up
    assert all(
        value >= 0 for e in steps for name in ("data_wait_s", "compute_s", "comm_s", "optimizer_s") for value in e[name]
    )

    # The same policy on the logged observations decides the same.
    from paceline.policies.balance import policy
    from paceline.types import Limits, Observation, from_plain

    chosen = policy("affine")
    state = chosen.init(2)
    template = Observation(0, 0, False, 1, Limits.of(2), (0.0,), (0.0,), (0.0,), (0.0,), (0.0,))
    again = []
    for event in logs[0]:
        if event["type"] == "window":
            decision, state = chosen.update(from_plain(template, event["observation"]), state)
            again.append((list(decision.split), decision.reason))
    assert again == [(split, reason) for _, _, split, reason in plans[0][1:]]
