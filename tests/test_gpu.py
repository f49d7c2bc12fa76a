"""The CUDA paths. Ranks share one GPU over gloo; skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm.launch import Screen
from paceline.lab import mps
from paceline.lab.cluster import Cluster, Node, WorkerSpec
from paceline.lab.start import Start, run_on
from tests import ranks
from tests import test_batch as batch
from tests.nets import flat, mlp, points
from tests.test_sync import against_reference, numbered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def pictures(count=96):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 16, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 10, (count,), generator=generator))


def train(balance):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    pace = paceline.init(balance=balance, timeout_s=60)
    assert pace.device.type == "cuda"
    model = mlp().double().to(pace.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model = pace.wrap(model, optimizer)
    synchronise, allowed = torch.cuda.synchronize, True

    def forbidden(*_):
        assert allowed, "the loop must not synchronise with the device"
        synchronise()

    torch.cuda.synchronize = forbidden
    loader = pace.loader(points(100), 24, pin_memory=True)
    times = []
    original = loader.coordinator._ask

    def ask(*args):
        times.extend(loader.coordinator._times)
        original(*args)

    loader.coordinator._ask = ask
    allowed = False
    for _ in range(4):
        for x, y in loader:
            assert x.device == pace.device
            F.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    allowed = True
    torch.cuda.synchronize = synchronise
    return (
        flat(model.module).cpu(),
        [(t.data_wait_s, t.compute_s, t.comm_s, t.optimizer_s) for t in times],
        pace.comm.backend,
    )


def test_exact_and_timed_without_synchronising():
    alone, _, backend = ranks.run(1, train, "equal", timeout_s=100)[0]
    assert "nccl" in backend
    for balance in ("fixed:1,2,5", "affine"):
        for result, times, shared_backend in ranks.run(3, train, balance, timeout_s=100):
            assert shared_backend == "gloo"  # nccl refuses two ranks on one GPU
            torch.testing.assert_close(result, alone, rtol=1e-9, atol=1e-10)
            assert len(times) >= 12
            assert all(value >= 0 for step in times for value in step)
            assert sum(step[1] for step in times) > 0
            assert sum(step[2] for step in times) > 0
            assert sum(step[3] for step in times) > 0


def amp(balance):
    pace = paceline.init(balance=balance, timeout_s=60)
    model = net().to(pace.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model = pace.wrap(model, optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    losses = []
    loader = pace.loader(pictures(), 48, pin_memory=True)
    for epoch in range(4):
        for number, (x, y) in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            if epoch == 1 and number == 0 and pace.rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss))
    return flat(model.module).cpu(), scaler.get_scale(), losses


def test_fp16_with_grad_scaler():
    results = ranks.run(2, amp, "fixed:1,3", timeout_s=100)
    assert all(torch.isfinite(result[0]).all() for result in results)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 2.0**13  # one overflow, seen by both
    assert results[1][2][-1] < results[1][2][0]


def sync_batch_norm(balance, convert):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    pace = paceline.init(balance=balance, timeout_s=60)
    model = net().double()
    if convert:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(pace.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model = pace.wrap(model, optimizer)
    for x, y in pace.loader(pictures(96), 48):
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.module).cpu(), model.module[1].running_mean.cpu()


def test_sync_batch_norm_on_unequal_shares_is_one_batch_norm_on_the_joined_batch():
    weights, mean = ranks.run(1, sync_batch_norm, "equal", False, timeout_s=100)[0]
    for result, their_mean in ranks.run(2, sync_batch_norm, "fixed:1,3", True, timeout_s=100):
        torch.testing.assert_close(their_mean, mean, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(result, weights, rtol=1e-6, atol=1e-8)


class Wide(nn.Module):
    """Needs 256 MB for every sample, for a moment."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        wide = h.unsqueeze(2).expand(-1, -1, 2**20) * 1.0
        return self.b(h + 0 * wide.mean(2))


def out_of_memory(limited):
    pace = paceline.init(balance="equal", timeout_s=60, replan_every=1)
    if limited and pace.rank == 1:
        whole = torch.cuda.get_device_properties(pace.device).total_memory
        torch.cuda.set_per_process_memory_fraction(5.5 * 2**30 / whole, pace.device)
    model = Wide().to(pace.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pace.wrap(model, optimizer)
    samples = []
    loader = pace.loader(points(64), 16)
    for _ in range(2):
        for x, y in loader:
            samples.append(pace._total.samples)
            pace.step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y))
            optimizer.step()
            optimizer.zero_grad()
    return flat(model.module).cpu(), samples


def test_out_of_memory_is_recovered_and_learned():
    free = ranks.run(2, out_of_memory, False, timeout_s=100)
    short = ranks.run(2, out_of_memory, True, timeout_s=100)
    for rank in range(2):
        torch.testing.assert_close(short[rank][0], free[rank][0], rtol=1e-4, atol=1e-5)
    assert short[1][1][0] == 8
    assert short[1][1][-1] < 8
    assert short[0][1][-1] > 8


def save_and_resume(path, resume):
    torch.backends.cudnn.deterministic = True
    pace = paceline.init(balance="fixed:1,2", timeout_s=60)
    model = net().to(pace.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model = pace.wrap(model, optimizer)
    loader = pace.loader(pictures(96), 32)
    if resume:
        pace.load(path)
    for _ in range(loader.epoch, 2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not resume and loader.step == 2:
                pace.save(path)
    return flat(model.module).cpu()


def test_resume_on_cuda(tmp_path):
    path = str(tmp_path / "c.ckpt")
    whole = ranks.run(2, save_and_resume, path, False, timeout_s=100)
    resumed = ranks.run(2, save_and_resume, path, True, timeout_s=100)
    torch.testing.assert_close(resumed[0], whole[0], rtol=1e-4, atol=1e-5)


# ---- the lab on a GPU

RATE = """
import sys, time, torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(5):
    a @ a
torch.cuda.synchronize()
begun = time.perf_counter()
for _ in range(60):
    a @ a
torch.cuda.synchronize()
print(60 / (time.perf_counter() - begun))
"""

needs_mps = pytest.mark.skipif(not mps.probe()[0], reason=f"no MPS here: {mps.probe()[1]}")


def rate(env, share):
    command = [sys.executable, "-c", RATE]
    env = {**os.environ, **env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}
    return float(subprocess.run(command, env=env, capture_output=True, check=True, timeout=100).stdout)


@needs_mps
def test_shares_of_the_gpu_and_a_daemon_of_somebody_else(tmp_path):
    theirs = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log")}
    for place in theirs.values():
        os.makedirs(place)
    subprocess.run([mps.CONTROL, "-d"], env={**os.environ, **theirs}, check=True, timeout=30)
    try:
        time.sleep(1)  # the daemon forks until it has become one
        strangers = mps.foreign()
        assert strangers
        assert "left alone" in mps.probe()[1]
        with mps.Daemon() as daemon:
            whole, tenth = rate(daemon.env, 100), rate(daemon.env, 10)
            assert tenth < 0.3 * whole
            folder = daemon.env["CUDA_MPS_PIPE_DIRECTORY"]
            assert folder in mps.daemons().values()
        assert folder not in mps.daemons().values()
        assert not os.path.exists(folder)
        assert mps.foreign() == strangers  # still there
        assert mps.daemons().keys() == set(strangers)
    finally:
        subprocess.run([mps.CONTROL], input="quit", env={**os.environ, **theirs}, text=True, timeout=30)


@needs_mps
def test_a_daemon_left_by_a_killed_lab_is_stopped_by_the_next():
    code = "import time; from paceline.lab import mps; d = mps.Daemon(); d.__enter__(); print('up', flush=True); time.sleep(99)"
    before = mps.daemons()
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout.readline() == "up\n"
    assert mps.clean() == []
    assert len(mps.daemons()) > len(before)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert len(mps.clean()) == 1
    assert mps.daemons().keys() <= before.keys()


MIXED = """
import sys, torch, torch.nn.functional as F, paceline
from tests.nets import flat, mlp, points
from tests.test_sync import against_reference, numbered
pace = paceline.init(balance="fixed:3,1,1" if sys.argv[1:] == ["3"] else None, timeout_s=60)
model = mlp().double().to(pace.device)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model = pace.wrap(model, optimizer)
for x, y in pace.loader(points(120), 24):
    F.cross_entropy(model(x.double()), y).backward()
    optimizer.step()
    optimizer.zero_grad()
print(pace.device.type, flat(model.module.cpu()).double().norm().item())
"""


class Kept(Screen):
    def __init__(self):
        self.text = ""

    def out(self, text):
        self.text += text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_cpu_and_gpu_in_one_world_give_what_one_process_gives(tmp_path):
    (tmp_path / "train.py").write_text(MIXED)
    env = {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    found = []
    for number, devices in enumerate((("cuda", "cpu", "cpu"), ("cpu",))):
        workers = tuple(WorkerSpec(device=device) for device in devices)
        cluster = Cluster("mixed", "", workers, mechanism="mixed", nodes=(Node("n", len(workers)),))
        screen = Kept()
        run_on(cluster, Start(tmp_path / "train.py", [str(len(workers))], tmp_path / str(number), env), screen)
        kind, norm = screen.text.split()
        assert kind == devices[0]
        found.append(float(norm))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def compressed(compress):
    pace = paceline.init(balance="fixed:1,2,3", timeout_s=60)
    assert pace.comm.staged
    model = mlp().to(pace.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model = pace.wrap(model, optimizer, compress=compress, bucket_cap_mb=0.0001)
    loader = pace.loader(points(200), 24, drop_last=True)
    for _ in range(5):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model).cpu()


def test_compressed_sums_of_gpu_gradients():
    exact, close = ranks.run(3, compressed, None), ranks.run(3, compressed, "bf16")
    assert all(torch.equal(one, close[0]) for one in close)
    moved = (exact[0] - flat(mlp())).norm()
    assert 0 < (close[0] - exact[0]).norm() < 0.01 * moved


def exact_arithmetic(*args):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return batch.train(*args)


def test_gradients_measured_on_a_gpu_and_a_batch_that_changes():
    told = {"balance": "fixed:1,2", "batch": batch.Told(), "replan_every": 3}
    results = ranks.run(2, exact_arithmetic, told, timeout_s=120)
    assert len(results[0][1]) >= 4
    batch.check_seen(results)
    changing = {"balance": "equal", "batch": batch.Told(batch.SIZES), "replan_every": 2}
    results = ranks.run(2, exact_arithmetic, changing, None, 3, timeout_s=120)
    batches = batch.joined(results)
    assert len({len(one) for one in batches}) > 3
    torch.testing.assert_close(results[0][2].double(), batch.alone(batches), rtol=1e-4, atol=1e-5)
    apart = {"sync": "local:h=3", "batch": batch.Told((24, 48)), "balance": "equal"}
    results = ranks.run(2, exact_arithmetic, apart, None, 2, timeout_s=120)
    assert results[0][1] == results[1][1]
    assert len({len(one) for one in batch.joined(results)}) > 1
    alone = {"batch": batch.Told(), "replan_every": 2}
    ((history, seen, _),) = ranks.run(1, exact_arithmetic, alone, None, 1, 25, None, None, None, True)
    assert seen
    batch.check_halves(history, seen)


@pytest.mark.parametrize("sync", ["allreduce", "local:h=2"])
def test_what_a_step_costs_on_a_gpu(sync, tmp_path):
    batch.test_goodput_tries_a_larger_batch_then_weighs_noise_against_cost(sync, tmp_path)


def local(sync, epochs=3):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    pace = paceline.init(sync=sync, nodes="2,1", balance="equal", timeout_s=60)
    with pace:
        model = mlp().to(pace.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model = pace.wrap(model, optimizer)
        loader = pace.loader(numbered(), 24)
        batches = []
        for _ in range(epochs):
            for x, y, number in loader:
                assert x.device.type == "cuda"
                batches.append(number.tolist())
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return batches, flat(model.module).cpu()


def locals_(methods):
    return [local(method) for method in methods]


def test_local_training_on_a_gpu_does_what_one_process_would():
    methods = [
        "overlap:h=3,delay=2",
        "hierarchical:h=3",
        "local:h=3",
        "daso:warm_up=1",
        "diloco:h=4,fragments=2,delay=1",
    ]
    results = ranks.run(3, locals_, methods, timeout_s=150)
    for number, method in enumerate(methods):
        against_reference({"sync": method, "nodes": "2,1", "epochs": 3}, [result[number] for result in results])
        assert all(torch.equal(result[number][1], results[0][number][1]) for result in results)
