"""Local training on real gloo ranks, against one process in float64."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import LoopbackWorld
from paceline.events import EventLog
from paceline.policies.sync import SYNC, Daso, Fixed, Overlap, Terms, sync_policy
from paceline.runtime import exchange
from paceline.runtime.hook import WeightedSum
from paceline.runtime.rounds import Rounds
from paceline.runtime.topology import declared
from tests import ranks, sync_reference
from tests.nets import flat, mlp, points

SIZE = 3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def frozen():
    model = mlp()
    model[2].weight.requires_grad_(False)
    return model


MODELS = {"plain": mlp, "frozen": frozen, "tied": Tied}


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)


def numbered(count=100):
    x, y = points(count).tensors
    return torch.utils.data.TensorDataset(x, y, torch.arange(count))


def train(case):
    """One run; returns the batches this worker had and its parameters after the last step."""
    exchange.CHUNK = case.get("chunk", 2**20)
    pace = paceline.init(
        balance=case.get("balance", "equal"),
        sync=case["sync"],
        nodes=case["nodes"],
        timeout_s=30,
        **case.get("init", {}),
    )
    with pace:
        model = MODELS[case.get("model", "plain")]()
        optimizer = sgd(model)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(numbered(case.get("count", 100)), 24)
        batches = []
        for _ in range(case.get("epochs", 2)):
            for x, y, number in loader:
                batches.append(number.tolist())
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return batches, flat(model.module), [p.detach().clone() for p in model.module.parameters()]


def train_all(cases):
    return [train(case) for case in cases]


def against_reference(case, results):
    nodes = declared(case["nodes"], len(results)).members
    policy = sync_policy(case["sync"])
    batches = [list(step) for step in zip(*(result[0] for result in results), strict=True)]
    kind = MODELS[case.get("model", "plain")]
    expected = sync_reference.train(
        policy,
        [list(part) for part in nodes],
        kind,
        sgd,
        numbered().tensors,
        batches,
        len(batches) // case.get("epochs", 2),
    )
    of = nodes if policy.terms.level == "node" else [(rank,) for rank in range(len(results))]
    for members, values in zip(of, expected, strict=True):
        for rank in members:
            mine = sync_reference.flat(_holder(kind, results[rank][1]))
            torch.testing.assert_close(mine.double(), values, rtol=2e-4, atol=2e-5, msg=lambda text: f"{case}: {text}")


def _holder(kind, values):
    model = kind()
    offset = 0
    for p in model.parameters():
        p.data.copy_(values[offset : offset + p.numel()].view_as(p))
        offset += p.numel()
    return model


METHODS = [
    "local:h=3",
    "local:h=3,level=node",
    "post-local:after=4,h=2",
    "hierarchical:h=3",
    "daso:warm_up=0",
    "daso:warm_up=1,cool_down=1,epochs=3",
    "daso:warm_up=0,b_max=1",
    "overlap:h=3,delay=2",
    "overlap:h=2",
    "overlap:h=4,delay=1,level=worker",
    "overlap:h=2,warm_up=3",
    "diloco:h=4",
    "diloco:h=4,fragments=2,delay=1",
    "diloco:h=3,delay=3,level=worker",
]
FEW = ["local:h=3", "daso:warm_up=0", "overlap:h=3,delay=2", "diloco:h=4,fragments=2,delay=1"]
SHAPES = {
    "one worker per node, tensors larger than a chunk": (METHODS, {"nodes": "1,1,1", "chunk": 100}),
    "unequal nodes": (FEW, {"nodes": "2,1"}),
    "unequal nodes apart, small chunks": (METHODS, {"nodes": [[0, 2], [1]], "chunk": 77}),
    "one node": (FEW, {"nodes": "3"}),
    "frozen": (FEW, {"nodes": "1,2", "model": "frozen"}),
    "tied": (FEW, {"nodes": "2,1", "model": "tied"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_method_does_what_one_process_would(shape):
    """Epochs of 5 steps, the last of them short: windows end early. Warm-up 0 where there is one."""
    methods, settings = SHAPES[shape]
    cases = [{"sync": method, "epochs": 3, **settings} for method in methods]
    results = ranks.run(SIZE, train_all, cases, timeout_s=240)
    for number, case in enumerate(cases):
        mine = [result[number] for result in results]
        against_reference(case, mine)
        # every epoch ends agreed, to the last bit
        assert all(torch.equal(one[1], mine[0][1]) for one in mine), case
        if case.get("model") == "frozen":
            assert all(torch.equal(one[2][2], frozen()[2].weight) for one in mine)


def test_four_workers_on_two_nodes_share_the_exchange():
    cases = [
        {"sync": method, "epochs": 2, "nodes": "2,2", "chunk": chunk}
        for method in ("overlap:h=2,delay=1", "hierarchical:h=2", "local:h=3", "overlap:h=2,level=worker")
        for chunk in (2**20, 301)
    ]
    results = ranks.run(4, train_all, cases, timeout_s=200)
    for number, case in enumerate(cases):
        against_reference(case, [result[number] for result in results])


def alone(methods):
    return [train({"sync": method, "nodes": None})[1] for method in methods]


def test_a_world_of_one_trains_as_ever():
    (results,) = ranks.run(1, alone, [*SYNC])
    assert all(torch.equal(result, results[0]) for result in results)


def test_h_of_one_is_allreduce():
    """Value a: bit for bit by the shortcut; averaging parameters after every step gives the same to rounding."""
    methods = ["allreduce", "local:h=1", "hierarchical:h=1", "overlap:h=1,delay=0", "overlap:h=1,delay=0,level=worker"]
    cases = [{"sync": method, "nodes": "1,1,1", "count": 96} for method in methods]
    results = ranks.run(SIZE, train_all, cases)
    for result in results:
        for other in result[1:3]:
            assert torch.equal(other[1], result[0][1])
        for other in result[3:]:
            torch.testing.assert_close(other[1], result[0][1], rtol=1e-5, atol=1e-6)


def compressed():
    return train_all(
        [
            {"sync": f"overlap:h=2,delay=1,compress={name}{level}", "nodes": "2,1", "epochs": 6}
            for name in ("none", "bf16", "int8")
            for level in ("", ",level=worker")
        ]
    )


def test_compression_follows_the_exact_run():
    results = ranks.run(SIZE, compressed, timeout_s=120)
    start = flat(mlp())
    for result in results:
        for level in (0, 1):
            exact = result[level][1]
            moved = (exact - start).norm()
            assert (result[2 + level][1] - exact).norm() < 0.02 * moved  # bf16
            assert (result[4 + level][1] - exact).norm() < 0.1 * moved  # int8
            assert not torch.equal(result[2 + level][1], exact)
    for number in range(6):
        assert torch.equal(results[0][number][1], results[1][number][1])  # mates, and everybody after an epoch
        assert torch.equal(results[0][number][1], results[2][number][1])


# ---------------------------------------------------------------------------------------------- constant gradient, many nodes
class Line(nn.Module):
    def __init__(self, start=0.0):
        super().__init__()
        self.x = nn.Parameter(torch.full((5,), start, dtype=torch.float32))


def walk(policy, size, steps, gradient=lambda rank, step: -1.0, samples=lambda rank: 1, nodes=None, watch=None):
    """Every worker a thread: `steps` steps of plain SGD along a given gradient. Parameters of all."""
    world = LoopbackWorld(size, timeout_s=30)
    results, errors, states = [None] * size, [], [None] * size

    def work(rank):
        try:
            comm = world.comm(rank)
            model = Line()
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            total = WeightedSum(comm)
            rounds = Rounds(
                policy, comm, declared(nodes or ",".join(["1"] * size), size), model, optimizer, total, EventLog(None)
            )
            for step in range(steps):
                total.weigh(1.0, step, samples(rank))
                value = gradient(rank, step)
                model.x.grad = (value(model.x.detach()) if callable(value) else value) * torch.ones_like(model.x)
                optimizer.step()
                before = model.x.detach().clone()
                rounds.after_step(0, ends_epoch=False, loss=lambda: None)
                if callable(watch):
                    watch(rank, step, before, model.x.detach().clone())
            results[rank] = model.x.detach().clone()
            held = rounds.exchange
            vectors = [held.anchor, held.sent, *([held.momentum] if held.momentum is not None else [])]
            states[rank] = rounds._state, sum(one.numel() for one in vectors) / model.x.numel()
            rounds.close(graceful=True)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(state == states[0] for state in states)
    return {"state": states[0][0], "copies": states[0][1]}.get(watch, results) if isinstance(watch, str) else results


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize(("h", "w"), [(1, 0), (1, 1), (4, 1), (4, 4), (7, 3)])
def test_a_constant_gradient_loses_nothing_with_the_corrected_merge(size, h, w):
    """Value b."""
    for x in walk(Overlap(steps=Fixed(h), delay=w), size, 21):
        torch.testing.assert_close(x / 21, torch.ones(5))


def printed(nodes, b, steps):
    """The published merge on numbers: every b steps send, one step later merge (before the next send goes, if b is 1)."""
    x, sent, values = 0.0, None, []
    for step in range(1, steps + 1):
        x += 1.0
        stepped = x
        if sent is not None:
            x, sent = (2 * x + nodes * sent) / (2 + nodes), None
        if step % b == 0:
            sent = stepped if b == 1 else x
        values.append(x)
    return values


@pytest.mark.parametrize(("size", "b", "progress"), [(4, 4, 0.833), (4, 1, 0.600), (64, 4, 0.758), (64, 1, 0.508)])
def test_a_constant_gradient_under_daso_loses_what_the_notes_say(size, b, progress):
    """Value b: the published merge scales the steps made while waiting."""
    long = printed(size, b, 4000)
    assert (long[-1] - long[1999]) / 2000 == pytest.approx(progress, abs=6e-4)
    for x in walk(Daso(b_max=b, warm_up=0), size, 13):
        torch.testing.assert_close(x, torch.full((5,), long[12]))


@pytest.mark.parametrize("compress", ["none", "bf16", "int8"])
@pytest.mark.parametrize("level", ["node", "worker"])
def test_a_merge_leaves_the_weighted_mean_as_it_was(compress, level):
    """Value c, with replicas of unequal weight, and with roundings too."""
    size, counts = 3, (5, 2, 3)
    nodes = [(0,), (1,), (2,)]
    seen = {}

    def watch(rank, step, before, after):
        seen[rank, step] = before.double(), after.double()

    policy = Overlap(steps=Fixed(4), delay=2, terms=Terms(compress=compress, level=level), drift_limit=0)
    walk(
        policy,
        size,
        21,
        gradient=lambda rank, step: (
            (0.1 * ((rank * 7 + step * 3) % 5) - 0.17) * torch.tensor([1.0, 0.37, 0.011, 2.3, 0.6])
        ),
        samples=lambda rank: counts[rank],
        nodes=nodes,
        watch=watch,
    )
    weights = [count / sum(counts) for count in counts]
    merges = 0
    for step in range(21):
        before = sum(w * seen[rank, step][0] for rank, w in enumerate(weights))
        after = sum(w * seen[rank, step][1] for rank, w in enumerate(weights))
        torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
        merges += any(not torch.equal(*seen[rank, step]) for rank in range(size))
    assert merges == 4


def test_a_nan_never_reaches_the_others():
    def gradient(rank, step):
        return float("nan") if (rank, step) == (1, 5) else -1.0

    xs = walk(Overlap(steps=Fixed(4), delay=2), 3, 24, gradient=gradient)
    assert all(bool(torch.isfinite(x).all()) for x in xs)
    assert all(float(x[0]) > 20 for x in xs)


def test_an_absurd_change_is_left_out():
    xs = walk(
        Overlap(steps=Fixed(4), delay=2), 4, 24, gradient=lambda rank, step: -1e4 if (rank, step) == (2, 6) else -1.0
    )
    assert all(20 < float(x[0]) < 30 for x in xs)


@pytest.mark.parametrize(
    ("method", "copies"),
    [
        ("local:h=2", 1),
        ("hierarchical:h=2,compress=int8", 1),
        ("daso:warm_up=0", 2),
        ("overlap:h=4", 2),
        ("diloco:h=4", 2),
        ("diloco:h=5,fragments=5,delay=1", 2.2),
    ],
)
def test_memory_is_what_the_documents_say(method, copies):
    assert walk(sync_policy(method), 2, 20, watch="copies") == pytest.approx(copies)
    written = (Path(__file__).parent.parent / "docs" / "sync.md").read_text()
    (row,) = [line for line in written.splitlines() if line.startswith(f"| `{method.partition(':')[0]}` |")]
    assert row.split("|")[-2].strip().startswith(f"{int(copies)}")


def quadratic(policy, steps=120, size=8):
    """Noisy gradients of x^2 / 2 from 1, the noise the same for all policies: mean loss of the mean over the last half."""
    noise = torch.randn(size, steps, 5, generator=torch.Generator().manual_seed(1))
    seen = {}

    def watch(rank, step, _, after):
        seen[rank, step] = after

    walk(policy, size, steps, lambda rank, step: lambda x: 0.05 * (x - 1 + 0.3 * noise[rank, step]), watch=watch)
    means = [sum(seen[rank, step] for rank in range(size)) / size for step in range(steps)]
    return [float((mean - 1).square().mean()) for mean in means]


def test_overlap_converges_as_blocking_averages_do_and_daso_more_slowly():
    blocking = quadratic(sync_policy("hierarchical:h=4"))
    overlap = quadratic(sync_policy("overlap:h=4,delay=1"))
    daso = quadratic(Daso(b_max=4, warm_up=0))
    late = slice(-30, None)
    assert sum(overlap[late]) <= 1.02 * sum(blocking[late])

    def reached(losses):
        return next(step for step, loss in enumerate(losses) if loss < 0.02)

    assert reached(overlap) <= reached(blocking) + 1
    assert reached(daso) > 1.1 * reached(blocking)


def test_a_node_of_few_samples_does_not_blow_up_what_was_rounded():
    def last(compress):
        policy = Overlap(steps=Fixed(4), delay=2, terms=Terms(compress=compress), drift_limit=0)
        spread = torch.tensor([1.0, 0.37, 0.011, 2.3, 0.6])
        return walk(
            policy, 3, 40, lambda rank, step: (0.3 + 0.01 * rank) * spread, samples=lambda rank: (1, 300, 200)[rank]
        )

    for exact, rounded in zip(last("none"), last("int8"), strict=True):
        torch.testing.assert_close(rounded, exact, rtol=0, atol=0.05)


def test_the_drift_guard_hears_of_replicas_that_pull_apart():
    policy = Overlap(steps=Fixed(8), delay=2, drift_limit=4.0)
    calm = walk(policy, 2, 60, watch="state")
    apart = walk(policy, 2, 60, gradient=lambda rank, step: 0.9 if rank else -1.0, watch="state")
    assert (calm.every, calm.shrink) == (8, 1)
    assert apart.every < 8
    assert apart.shrink > 1


def test_a_nan_with_fragments_is_healed_whole():
    policy = sync_policy("diloco:h=4,fragments=2,delay=1,outer_lr=1.0,outer_momentum=0.0")
    xs = walk(policy, 3, 24, gradient=lambda rank, step: float("nan") if (rank, step) == (1, 5) else -1.0)
    assert all(bool(torch.isfinite(x).all()) for x in xs)
