"""Batches that change, on real gloo ranks: what policies see, what becomes of the data, of the update and of the learning rate."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import LoopbackWorld
from paceline.errors import ConfigError
from paceline.events import EventLog, events_path, read
from paceline.policies.batch import Gradients, NormTest, Size, batch_policy
from paceline.policies.batch.noise import Averages, unbiased
from paceline.runtime.hook import WeightedSum
from paceline.runtime.meter import Meter
from paceline.runtime.per_sample import per_sample
from paceline.runtime.sizing import Sizing, Sketches
from paceline.runtime.sketch import WIDTH, Sketch
from tests import ranks
from tests.nets import flat, mlp, points

COUNT = 192
SEEN: list[Gradients] = []


@dataclass(frozen=True)
class Told:
    """Asks for the given batches one after the other, a step each; keeps what it saw."""

    sizes: tuple[int, ...] = ()
    needs: str = "inner"
    at: str = "first"
    name = "told"

    def init(self):
        return 0

    def planned(self, step, samples):
        return None

    def update(self, seen, state):
        SEEN.append(seen)
        if not self.sizes:
            return Size(seen.total), state
        total = self.sizes[state % len(self.sizes)]
        return Size(total, f"told {total}" if total != seen.total else "", noise=100.0 + total + 7 * state), state + 1


def numbered(count=COUNT):
    x, y = points(count).tensors
    return torch.utils.data.TensorDataset(x, y, torch.arange(count))


def train(options, loader_options=None, epochs=2, batch=24, stop=None, save=None, resume=None, step=False, width=32):
    SEEN.clear()
    with paceline.init(timeout_s=30, **options) as pace:
        model = mlp(width=width).to(pace.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(numbered(), batch, **(loader_options or {}))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
        if resume is not None:
            pace.load(resume, scheduler=scheduler)
        history = []
        while loader.epoch < epochs:
            for x, y, number in loader:
                before = flat(model.module).cpu().clone()
                if step:
                    pace.step(lambda part: F.cross_entropy(model(part[0]), part[1]), (x, y))
                else:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                mine = number.tolist() if pace._total.samples else []
                history.append({"rows": mine, "before": before, "lr": optimizer.param_groups[0]["lr"]})
                if stop is not None and loader.step == stop:
                    pace.save(save, scheduler=scheduler)
                    return history, list(SEEN), flat(model.module).cpu()
        return history, list(SEEN), flat(model.module).cpu()


def joined(results):
    """The global batch of every step."""
    return [[i for one in step for i in one["rows"]] for step in zip(*(r[0] for r in results), strict=True)]


def alone(batches, factors=None, width=32):
    """One process on the joined batches, in float64."""
    model = mlp(width=width).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    x, y, _ = numbered().tensors
    lr = 0.05
    for number, rows in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (factors[number] if factors else 1.0)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows].double()), y[rows]).backward()
        optimizer.step()
        lr *= 0.8 if (number + 1) % 5 == 0 else 1.0
    return flat(model)


def gradient(values, rows, width=32):
    model = mlp(width=width).double()
    torch.nn.utils.vector_to_parameters(values.double(), model.parameters())
    x, y, _ = numbered().tensors
    F.cross_entropy(model(x[rows].double()), y[rows]).backward()
    return torch.cat([p.grad.view(-1) for p in model.parameters()])


def expected(history_of_parts, before, width=32):
    """What a policy should see of parts with these rows."""
    parts = [(len(rows), gradient(before[part], rows, width)) for part, rows in enumerate(history_of_parts) if rows]
    whole = sum(b for b, _ in parts)
    joint = sum(b * g for b, g in parts) / whole
    return (
        tuple(float(b) for b, _ in parts),
        tuple(float(g @ g) for _, g in parts),
        float(joint @ joint),
        tuple(float(g @ joint) for _, g in parts),
    )


@pytest.mark.parametrize("balance", ["equal", "fixed:1,2,5", "fixed:1,0.001,1"])
def test_policies_see_what_one_process_computes_from_micro_batches(balance):
    """Value d, and for unequal parts too; a worker without samples is no part."""
    results = ranks.run(3, train, {"balance": balance, "batch": Told(), "replan_every": 3}, timeout_s=120)
    assert len(results[0][1]) >= 9
    check_seen(results)


def check_seen(results):
    """What policies saw is what one process computes, to the rounding of float32."""
    seen = results[0][1]
    assert all(result[1] == seen for result in results)
    for one in seen:
        step = [result[0][one.step] for result in results]
        sizes, squares, joint, inner = expected([s["rows"] for s in step], [s["before"] for s in step])
        assert one.sizes == sizes
        assert one.squares == pytest.approx(squares, rel=1e-4)
        assert one.joint == pytest.approx(joint, rel=1e-4)
        assert one.inner == pytest.approx(inner, rel=1e-3, abs=1e-6)
        test = NormTest(0.6)
        by_hand = dataclasses.replace(one, sizes=sizes, squares=squares, joint=joint)
        assert test.update(one, Averages())[0].total == pytest.approx(test.update(by_hand, Averages())[0].total, abs=1)


SIZES = (24, 40, 7, 64, 64, 30, 2, 96, 24)


@pytest.mark.parametrize(
    ("options", "loader"),
    [
        ({"balance": "affine"}, {}),
        ({"balance": "fixed:1,2,5", "replan_every": 1}, {"drop_last": True}),
        ({"balance": "equal"}, {"num_workers": 1}),
    ],
    ids=["affine", "drop_last", "prefetch"],
)
def test_a_batch_that_changes_keeps_every_promise(options, loader):
    epochs = 2 if loader.get("num_workers") else 4  # each epoch starts loader processes
    results = ranks.run(3, train, {"batch": Told(SIZES), **options}, loader, epochs, timeout_s=180)
    batches = joined(results)
    assert len({len(batch) for batch in batches}) > 3
    begin = 0
    for epoch in range(epochs):
        end, used = begin, 0
        while (
            used < COUNT
            and end < len(batches)
            and len({*list(chain(*batches[begin : end + 1]))}) == used + len(batches[end])
        ):
            used += len(batches[end])
            end += 1
        taken = list(chain(*batches[begin:end]))
        assert len(taken) == len(set(taken)), f"a sample came twice in epoch {epoch}"
        assert loader.get("drop_last") or len(taken) == COUNT, f"epoch {epoch} has {len(taken)} samples"
        begin = end
    assert begin == len(batches)
    for result in results:
        torch.testing.assert_close(result[2].double(), alone(batches), rtol=1e-4, atol=1e-5)


def test_a_run_that_changes_its_batch_resumes_where_it_was(tmp_path):
    """The same global batches and parameters as without a break, on the same and on another number of workers."""
    options = {"balance": "fixed:1,2,2", "batch": Told(SIZES), "replan_every": 2, "lr_rule": "adascale"}
    unbroken = ranks.run(3, train, options, None, 4, timeout_s=120)
    whole = joined(unbroken)
    stop = 9
    path = tmp_path / f"{stop}.safetensors"
    first = joined(ranks.run(3, train, options, None, 4, 24, stop, path, timeout_s=120))
    assert first == whole[:stop]
    same = ranks.run(3, train, options, None, 4, 24, None, None, path, timeout_s=120)
    assert first + joined(same) == whole
    assert torch.equal(same[0][2], unbroken[0][2])
    options["balance"] = "fixed:1,2"
    prefetched = ranks.run(2, train, options, {"num_workers": 1}, 2, timeout_s=120)
    path = tmp_path / "prefetched.safetensors"
    first = ranks.run(2, train, options, {"num_workers": 1}, 2, 24, 4, path, timeout_s=120)
    same = ranks.run(2, train, options, {"num_workers": 1}, 2, 24, None, None, path, timeout_s=120)
    assert joined(first) + joined(same) == joined(prefetched)
    assert torch.equal(same[0][2], prefetched[0][2])
    first = joined(first)
    fewer = ranks.run(
        1,
        train,
        {**options, "balance": "equal", "batch": "constant", "lr_rule": "none"},
        None,
        4,
        24,
        None,
        None,
        path,
        timeout_s=120,
    )
    rest = list(chain(*joined(fewer)))
    done = list(chain(*first))
    assert len(done + rest) == 4 * COUNT
    counts = torch.bincount(torch.tensor(done + rest), minlength=COUNT)
    assert set(counts.tolist()) == {4}


@pytest.mark.parametrize("rule", ["linear", "sqrt", "adascale"])
def test_learning_rate_rules_compose_with_a_scheduler(rule, tmp_path):
    def factor(batch, noise):
        return {
            "linear": batch / 24,
            "sqrt": math.sqrt(batch / 24),
            "adascale": (1 + noise / 24) / (1 + noise / batch),
        }[rule]

    sizes = (24, 48, 96, 24)
    options = {"balance": "equal", "batch": Told(sizes), "replan_every": 1, "lr_rule": rule, "run_dir": str(tmp_path)}
    results = ranks.run(2, train, options, {}, 2, timeout_s=120)
    batches = joined(results)
    events = list(read(events_path(tmp_path, 0)))
    changed = [e for e in events if e["type"] == "lr" and e["rule"] == rule]
    told = [(e["step"], e["batch"], e["factor"]) for e in changed]
    assert {batch for _, batch, _ in told} == {24, 48, 96}
    assert all(e["factor"] == pytest.approx(factor(e["batch"], e["noise"])) for e in changed)
    factors = [next((f for at, _, f in reversed(told) if at <= step), 1.0) for step in range(len(batches))]
    torch.testing.assert_close(results[0][2].double(), alone(batches, factors), rtol=1e-4, atol=1e-5)
    # the scheduler's rate is the one without the factor
    rates = [0.05 * 0.8 ** ((n + 1) // 5) for n in range(len(batches))]
    assert [one["lr"] for one in results[0][0]] == pytest.approx(rates)
    changes = [e for e in events if e["type"] == "batch"]
    assert {e["total"] for e in changes} == {24, 48, 96}
    assert all(e["reason"] == f"told {e['total']}" for e in changes)


def test_shares_beyond_memory_go_in_micro_batches():
    """Caps of 8 samples: with pace.step the batch grows past them, and the update is that of the joined batch."""
    options = {"balance": "equal", "batch": Told((24, 48, 96)), "replan_every": 1, "max_local_batch": 8}
    with_step = ranks.run(3, train, options, None, 3, 24, None, None, None, True, timeout_s=120)
    batches = joined(with_step)
    assert {len(batch) for batch in batches} >= {24, 48, 96}
    torch.testing.assert_close(with_step[0][2].double(), alone(batches), rtol=1e-4, atol=1e-5)
    plain = ranks.run(3, train, {**options, "replan_every": 2}, None, 2, timeout_s=120)
    assert {one.most for one in plain[0][1]} == {
        24
    }  # a plain loop cannot go past what memory holds, whatever a policy asks
    assert max(len(step["rows"]) for result in plain for step in result[0]) == 8


def check_halves(history, seen):
    for one in seen:
        rows, before = history[one.step]["rows"], history[one.step]["before"]
        half = -(-len(rows) // 2)
        sizes, squares, joint, inner = expected([rows[:half], rows[half:]], [before, before])
        assert one.sizes == sizes
        assert one.squares == pytest.approx(squares, rel=1e-3)
        assert one.joint == pytest.approx(joint, rel=1e-3)
        assert one.inner == pytest.approx(inner, rel=1e-2, abs=1e-6)


def test_one_worker_compares_the_halves_of_its_batch(tmp_path):
    ((history, seen, _),) = ranks.run(
        1, train, {"batch": Told(), "replan_every": 2}, None, 1, 25, None, None, None, True
    )
    assert len(seen) >= 3
    check_halves(history, seen)
    # a plain loop has nothing to compare: the batch stays, and the log says why
    options = {"batch": "noise-scale", "replan_every": 2, "run_dir": str(tmp_path)}
    ((history, _, _),) = ranks.run(1, train, options, None, 1)
    assert {len(one["rows"]) for one in history} == {24}
    text = next(tmp_path.rglob("*.jsonl")).read_text()
    assert text.count("shows no variance") == 1


def test_the_per_sample_form_is_the_sum_over_single_samples():
    model = mlp()
    x, y, _ = numbered(20).tensors
    seen = per_sample(model, F.cross_entropy, x, y)
    rows = [gradient(flat(model), [i]) for i in range(20)]
    mean = sum(rows) / 20
    assert seen.squares == pytest.approx([float(g @ g) for g in rows], rel=1e-4)
    assert seen.joint == pytest.approx(float(mean @ mean), rel=1e-4)
    assert seen.inner == pytest.approx([float(g @ mean) for g in rows], rel=1e-3, abs=1e-6)
    trace = torch.stack(rows).var(0).sum()
    assert unbiased(seen)[0] == pytest.approx(float(trace), rel=1e-4)


def test_sketches_keep_lengths_and_inner_products():
    random = torch.Generator().manual_seed(0)
    shapes = (WIDTH * 300 + 17, 5, WIDTH, 40_000)
    alike = torch.randn(WIDTH * 256, generator=random)
    blocks = torch.cat([alike + torch.randn(WIDTH * 256, generator=random) for _ in range(4)])
    low_rank = [torch.outer(torch.randn(200, generator=random), torch.randn(200, generator=random)).view(-1)]
    for left, right in (
        (
            [torch.randn(n, generator=random) for n in shapes],
            [torch.randn(n, generator=random) for n in shapes],
        ),
        ([blocks], [blocks.flip(0)]),  # blocks that look alike
        (low_rank, [low_rank[0] + torch.randn(40_000, generator=random)]),
    ):
        sketches = []
        for pieces in (left, right):
            sketch = Sketch()
            sketch.take(pieces, 8)
            sketches.append(sketch.values.double())
        a, b = torch.cat(left).double(), torch.cat(right).double()
        scale = float(a.norm() * b.norm())
        assert float(sketches[0] @ sketches[0]) == pytest.approx(float(a @ a), rel=0.15)
        assert float(sketches[0] @ sketches[1]) == pytest.approx(float(a @ b), abs=0.15 * scale)


@pytest.mark.parametrize(
    ("sync", "at"),
    [
        ("local:h=30", "last"),
        ("local:h=3", "first"),
        ("local:h=3", "last"),
        ("hierarchical:h=4", "first"),
        ("overlap:h=3", "first"),
    ],
)
def test_local_training_looks_at_one_step_of_a_round(sync, at):
    """Sketches of all replicas: those of the round's first step stand at the same point, as published those of its last."""
    nodes = [[0, 2], [1]] if sync.startswith(("hier", "over")) else None
    options = {"sync": sync, "batch": Told((24, 48, 36), at=at), "nodes": nodes, "balance": "fixed:1,2,1"}
    results = ranks.run(3, train, options, None, 3, 24, None, None, None, False, 64, timeout_s=120)
    seen = results[0][1]
    assert seen == results[1][1] == results[2][1]
    assert len(seen) >= 3
    groups = [[0, 2], [1]] if nodes else [[0], [1], [2]]
    steps = list(zip(*(r[0] for r in results), strict=True))
    begins = [n for n, step in enumerate(steps) if all(torch.equal(s["before"], step[0]["before"]) for s in step)]
    for one in seen:
        step = steps[one.step]
        rows = [[i for rank in group for i in step[rank]["rows"]] for group in groups]
        sizes, squares, joint, inner = expected(rows, [step[group[0]]["before"] for group in groups], 64)
        assert one.sizes == sizes
        assert one.squares == pytest.approx(squares, rel=0.2)  # sketches scatter
        assert one.joint == pytest.approx(joint, rel=0.25)
        assert one.inner == pytest.approx(inner, abs=0.2 * joint)
        if at == "last":
            assert one.step + 1 in [*begins, len(steps)]
        elif not sync.startswith("overlap"):  # where replicas are never quite at the same point
            assert one.step in begins
    assert len({len(batch) for batch in joined(results)}) > 1


def test_local_training_with_a_batch_that_changes_resumes(tmp_path):
    options = {"sync": "local:h=3", "batch": Told((24, 48, 36)), "balance": "equal"}
    whole = ranks.run(2, train, options, None, 3, timeout_s=120)
    for stop in (4, 5):
        path = tmp_path / f"{stop}.safetensors"
        first = ranks.run(2, train, options, None, 3, 24, stop, path, timeout_s=120)
        rest = ranks.run(2, train, options, None, 3, 24, None, None, path, timeout_s=120)
        assert joined(first) + joined(rest) == joined(whole)
        assert torch.equal(rest[1][2], whole[1][2])


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.scale = nn.Linear(8, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.inner(x).detach() + 0 * self.scale


def constant_loss(folder):
    with paceline.init(timeout_s=30, batch="noise-scale:patience=1", replan_every=2, run_dir=folder) as pace:
        model = Frozen()
        for p in model.inner.parameters():
            p.requires_grad_(False)
        optimizer = torch.optim.SGD([model.scale], 0.1)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(points(96), 8)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return loader.batch


def test_a_zero_gradient_keeps_the_batch_and_is_said_once(tmp_path):
    assert ranks.run(2, constant_loss, str(tmp_path)) == [8, 8]
    for path in tmp_path.rglob("*.jsonl"):
        assert path.read_text().count("gradient is zero") == 1


def refused(options, loader, text):
    try:
        with paceline.init(timeout_s=30, **options) as pace:
            pace.wrap(mlp(), None)
            pace.loader(points(100), 24, **loader)
    except ConfigError as error:
        return text in str(error), str(error)
    return False, "not refused"


@pytest.mark.parametrize(
    ("batch", "loader", "text"),
    [
        ("noise-scale:most=101", {}, "got most=101 for 100 samples"),
        ("noise-scale", {"accumulate": 2}, "accumulate=2 counts batches of one size"),
        ("schedule:0=24,50=101", {}, "must not exceed the dataset: got 101 for 100"),
        ("schedule:0=32", {}, "begins with the loader's batch_size=24; got 32"),
        ("norm-test:eta=1.2", {}, "eta must lie between 0 and 1"),
        ("norm-test:at=lst", {}, "at must be 'first' or 'last'"),
        ("noise-scale:factor=abc", {}, "factor must be a number above 1"),
        ("norm-test:least=64,most=32", {}, "least must not exceed most"),
    ],
)
def test_bad_input_is_refused_before_training(batch, loader, text):
    ok, message = refused({"batch": batch}, loader, text)
    assert ok, message


def test_combinations_that_make_no_sense_are_refused():
    for options, text in (
        ({"batch": "noise-scale", "balance": "dp"}, "takes their plain mean"),
        ({"batch": "schedule:0=24,50=48", "lr_rule": "adascale"}, "does not measure"),
        ({"batch": "noise-scale", "lr_rule": "sqrt"}, "call pace.wrap(model, optimizer)"),
    ):
        ok, message = refused(options, {}, text)
        assert ok, message


def test_gradients_that_are_not_finite_are_passed_over_and_counted():
    sizing = Sizing(batch_policy("noise-scale:patience=1"), 24, 1000, EventLog(None))
    bad = [[math.inf, *[0.0] * (WIDTH - 1)], [-math.inf, *[0.0] * (WIDTH - 1)]]
    assert sizing.from_sketches(Sketches(0, [8.0, 8.0], bad), 1000).total == 24
    rows = np.full((2, sizing.numbers(4)), np.nan)
    rows[:, :5] = [[3, 8, math.inf, math.nan, math.nan], [3, 8, 1.0, math.nan, math.nan]]
    assert sizing.from_window(rows, 1000).total == 24
    assert sizing.state.skipped == 2
    one_missing = rows.copy()
    one_missing[1] = np.nan
    assert sizing.from_window(one_missing, 1000) is None  # a worker has not told: no part is idle


def test_an_idle_worker_weighted_at_its_outputs_is_finite():
    """SyncBatchNorm with a batch too small for everybody."""
    meter = Meter()
    total = WeightedSum(LoopbackWorld(1).comm(0), meter)
    total.at_outputs, total.measures = True, "inner"
    meter.fetch()
    meter.batch(0, 0)
    total.weigh(0.0, 0, 0)
    total.send(torch.zeros(5))
    total.last_sent()
    total.finish()
    meter.updated()
    meter.fetch()
    (times,) = meter.take()
    assert times.finite
    assert times.parts == ((0.0, 0.0, 0.0),)


def test_a_batch_larger_than_the_data_keeps_its_learning_rate():
    options = {"balance": "equal", "lr_rule": "linear"}
    batches = joined(ranks.run(2, train, options, None, 2, 500, timeout_s=60))
    assert [len(batch) for batch in batches] == [COUNT, COUNT]
    torch.testing.assert_close(
        ranks.run(2, train, options, None, 2, 500)[0][2].double(), alone(batches), rtol=1e-4, atol=1e-5
    )


def test_a_schedule_is_kept_to_the_sample():
    options = {"balance": "equal", "batch": "schedule:0=24,50=10,150=60"}
    batches = joined(ranks.run(2, train, options, None, 2, timeout_s=60))
    used, sizes = 0, []
    for batch in batches:
        left = COUNT - used % COUNT
        sizes.append(min(left, 24 if used < 50 else 10 if used < 150 else 60))
        used += len(batch)
    assert [len(batch) for batch in batches] == sizes
    assert batch_policy("schedule:0=24,50=10,150=60").planned(0, 149) == 10


def by_samples():
    with paceline.init(timeout_s=30, batch=Told((24, 48, 8)), replan_every=1) as pace:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(numbered(), 24)
        scheduler = paceline.BySamples(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), loader, every=60)
        seen = []
        for x, y, _ in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            seen.append((loader.samples, optimizer.param_groups[0]["lr"]))
        kept = scheduler.state_dict()
        scheduler.load_state_dict(kept)
        return seen


def test_schedulers_count_samples():
    (seen, _) = ranks.run(2, by_samples)
    assert len({b - a for (a, _), (b, _) in pairwise(seen)}) > 1
    assert all(lr == pytest.approx(0.1 * 0.5 ** (samples // 60)) for samples, lr in seen)
    assert seen[-1][0] == COUNT
    with pytest.raises(ConfigError, match="every must be"):
        paceline.BySamples(None, None, 0)


def test_every_event_of_a_batch_has_a_reason(tmp_path):
    options = {"batch": "norm-test:eta=0.3,most=96", "run_dir": str(tmp_path), "balance": "equal"}
    results = ranks.run(2, train, options, None, 4, timeout_s=60)
    events = list(read(events_path(tmp_path, 0)))
    changes = [e for e in events if e["type"] == "batch"]
    assert changes
    assert all("eta=0.3" in e["reason"] and "c=10.1" in e["reason"] and e["total"] > e["before"] for e in changes)
    assert max(len(batch) for batch in joined(results)) <= 96


@pytest.mark.parametrize("sync", ["allreduce", "local:h=2"])
def test_goodput_tries_a_larger_batch_then_weighs_noise_against_cost(sync, tmp_path):
    """Equal workers with equal shares tell nothing about fixed costs, until the batch has changed once."""
    options = {"batch": "goodput:patience=1,least=8", "run_dir": str(tmp_path), "balance": "equal", "sync": sync}
    results = ranks.run(2, train, {**options, "replan_every": 2}, None, 3, timeout_s=60)
    for rank in (0, 1):
        reasons = [e["reason"] for e in read(events_path(tmp_path, rank)) if e["type"] == "batch"]
        assert "30 samples tell what a step of 24 costs before its first" in reasons[0]
        assert any("fixed cost is worth" in reason for reason in reasons), reasons
    assert sorted(chain(*joined(results))) == sorted(list(range(COUNT)) * 3)
