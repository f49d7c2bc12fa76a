"""The lab's mechanisms, for real: quotas, disturbances, nodes; and that nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.comm.launch import Screen
from paceline.errors import ConfigError, LaunchError
from paceline.lab import cgroup, mps, netns
from paceline.lab.cluster import Cluster, Disturbance, Link, Node, WorkerSpec
from paceline.lab.director import Director
from paceline.lab.limit import measure
from paceline.lab.probe import missing, probe
from paceline.lab.start import Start, clean, lab_dir, overloaded, run_on
from paceline.lab.worker import pid_path, record_path

pytestmark = pytest.mark.xdist_group("lab")  # they look at what others left on the machine
quotas = pytest.mark.skipif(not cgroup.probe()[0], reason=f"no CPU quotas here: {cgroup.probe()[1]}")
links = pytest.mark.skipif(not netns.probe()[0], reason=f"no links here: {netns.probe()[1]}")

# torch's launcher leaves its log files to the garbage collector when it runs in this process.
launches = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Kept(Screen):
    """Keeps what the first worker prints."""

    def __init__(self):
        self.text = ""

    def out(self, text):
        self.text += text

    def err(self, text):
        pass


# ---- cgroup


def test_where_groups_are(tmp_path):
    assert cgroup.find("proc /proc proc rw 0 0\ncgroup /c/cpuset cgroup rw,cpuset 0 0") is None
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    assert cgroup.find(f"cgroup2 {tmp_path} cgroup2 rw 0 0") == cgroup.Hierarchy(2, tmp_path)
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    assert cgroup.find(f"cgroup2 {tmp_path} cgroup2 rw 0 0") is None


def test_what_is_written():
    base = Path("/x")
    first, second = cgroup.Hierarchy(1, base), cgroup.Hierarchy(2, base)
    assert cgroup.writes(first, base / "g", 1.5) == [
        (base / "g" / "cpu.cfs_period_us", "10000"),
        (base / "g" / "cpu.cfs_quota_us", "15000"),
    ]
    assert cgroup.writes(second, base / "g", 0.02) == [(base / "g" / "cpu.max", "1000 50000")]


BUSY = """
import os, sys, time
from paceline.lab.cgroup import join
join(0)
begun, used = time.monotonic(), time.process_time()
while time.monotonic() - begun < 0.6:
    pass
print((time.process_time() - used) / (time.monotonic() - begun))
"""


@quotas
def test_a_quota_is_kept_and_can_be_changed():
    with cgroup.Groups([0.3, None]) as groups:
        env = {**os.environ, cgroup.BASE: str(groups.base)}

        def share():
            return float(subprocess.run([sys.executable, "-c", BUSY], env=env, capture_output=True, check=True).stdout)

        assert share() < 0.36
        groups.set(0, 0.15)
        assert share() < 0.2
        base = groups.base
        assert base.exists()
    assert not base.exists()


@quotas
def test_groups_are_gone_after_a_failure_and_take_processes_along():
    sleeper = subprocess.Popen(["sleep", "100"])
    groups = cgroup.Groups([0.5])

    def fail():
        with groups:
            (cgroup.group(groups.base, 0) / "cgroup.procs").write_text(str(sleeper.pid))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not groups.base.exists()
    assert sleeper.wait(timeout=5) == -signal.SIGKILL


# ---- what is left by a launcher that was killed

LEAVES = """
import sys, time
from paceline.lab import cgroup, netns
from paceline.lab.cluster import Link
with cgroup.Groups([0.5]) as groups, netns.Network([Link(up_mbit=100), Link()]) as network:
    print(groups.base, network.plan.hub, flush=True)
    time.sleep(100)
"""


@quotas
@links
def test_the_next_start_cleans_up_after_a_kill():
    launcher = subprocess.Popen([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True)
    base, hub = launcher.stdout.readline().split()
    assert Path(base).exists()
    assert not {base, hub} & set(clean())  # its owner lives
    assert Path(base).exists()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert Path(base).exists()
    assert Path("/run/netns", hub).exists()
    clean()
    assert not Path(base).exists()
    assert not Path("/run/netns", hub).exists()
    assert not {base, hub} & set(clean())


# ---- MPS: without a GPU, only what can be said


def test_mps_without_a_gpu_says_what_to_do():
    works, sentence = mps.probe()
    if works:
        pytest.skip("there is a GPU: tests/test_gpu.py has the real thing")
    assert "paced" in sentence or "install" in sentence or "no NVIDIA GPU" in sentence
    with pytest.raises(ConfigError, match="mechanism 'mps' needs an NVIDIA GPU with MPS"):
        with mps.Daemon():
            pass


def test_what_a_cluster_lacks_is_named():
    found = probe()
    assert [one.name for one in found] == ["paced", "cgroup", "mps", "mixed", "links", "paced links"]
    assert all(one.sentence for one in found)
    shares = Cluster("x", "", (WorkerSpec(gpu_share=50),), mechanism="mps", nodes=(Node("n", 1),))
    lacking = [one.name for one in missing(shares, found)]
    assert lacking == ([] if mps.probe()[0] else ["mps"])


@pytest.mark.parametrize(
    ("workers", "mechanism", "words"),
    [
        ([WorkerSpec(cores=512)] * 2, "cgroup", "add up to 1024 cores"),
        ([WorkerSpec(gpu_share=80)] * 2, "mps", "add up to 160 %, 1.6 times one GPU"),
        ([WorkerSpec(per_sample_s=0.1)] * 1000, "paced", "1000 paced workers"),
        ([WorkerSpec(per_sample_s=0.1)] * 2, "paced", None),
    ],
)
def test_a_cluster_larger_than_the_machine(workers, mechanism, words):
    warning = overloaded(Cluster("x", "", tuple(workers), mechanism=mechanism))
    assert warning is None if words is None else words in warning


# ---- disturbances from outside


class Links:
    """Stands in for a network: notes what the director asks of it."""

    def __init__(self):
        self.calls = []

    def drop(self, node):
        self.calls.append(("drop", node))

    def restore(self, node):
        self.calls.append(("restore", node))


def wait_for(condition, what):
    deadline = time.monotonic() + 80
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def netns_of(pid):
    return list(Path("/run/netns").glob(f"paceline-{pid}-*"))


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_director_pauses_hogs_and_drops(tmp_path):
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    pid_path(tmp_path, 0).write_text(str(worker.pid))
    record = record_path(tmp_path, 0).open("w")

    def steps(count):
        record.write("{}\n" * count)
        record.flush()

    network = Links()
    cluster = Cluster(
        "x",
        "",
        (WorkerSpec(),),
        (
            Disturbance("pause", 0, seconds=(0.3, 0.3), from_step=3),
            Disturbance("hog", 0, hogs=2, from_step=5, until_step=8),
            Disturbance("drop", node=1, from_step=9, until_step=12),
        ),
        nodes=(Node("a", 1), Node("b", 0, Link(10, 10))),
    )

    def hogs():
        return subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "paceline.lab.hog"], capture_output=True).stdout

    try:
        with Director(cluster, tmp_path, None, network, {}):
            steps(2)
            time.sleep(0.15)
            assert state_of(worker.pid) == "R"
            steps(1)
            wait_for(lambda: state_of(worker.pid) == "T", "stopped")
            wait_for(lambda: state_of(worker.pid) == "R", "goes on")
            steps(2)
            wait_for(lambda: len(hogs().split()) == 2, "two hogs")
            steps(3)
            wait_for(lambda: not hogs(), "hogs gone")
            steps(1)
            wait_for(lambda: network.calls == [("drop", 1)], "dropped")
        assert network.calls == [("drop", 1), ("restore", 1)]  # the end of the run ends it
    finally:
        record.close()
        worker.kill()
        worker.wait()


# ---- whole runs

SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
for step in range(int(sys.argv[1])):
    if len(sys.argv) > 2 and step == 2 and dist.get_rank() == int(sys.argv[2]):
        raise ValueError("this worker had enough")
    model(torch.randn(8, 256)).sum().backward()
if dist.get_rank() == 0:
    print("node", os.environ["PACELINE_NODE"], "of", dist.get_world_size(), "as local", os.environ["LOCAL_WORLD_SIZE"])
dist.barrier()
del model
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def two_nodes(**kwargs):
    return Cluster(
        "two",
        "",
        (WorkerSpec(0.01, 0.001),) * 3,
        nodes=(Node("near", 1, Link(100, 100)), Node("far", 2, Link(100, 100, 3))),
        **kwargs,
    )


@links
def test_unequal_nodes_over_real_links(tmp_path, script):
    screen = Kept()
    run_on(two_nodes(), Start(script, ["4"], tmp_path / "run"), screen)
    assert screen.text == "node near of 3 as local 1\n"
    for worker in range(3):
        assert len(record_path(lab_dir(tmp_path / "run"), worker).read_text().splitlines()) == 4
    assert not netns_of(os.getpid())


@links
def test_a_failing_worker_on_another_node_is_named(tmp_path, script):
    with pytest.raises(LaunchError, match="this worker had enough") as caught:
        run_on(two_nodes(), Start(script, ["4", "2"], tmp_path / "run"), Kept())
    assert "on node far" in str(caught.value)


@launches
def test_paced_links_need_nothing_and_take_their_time(tmp_path, script):
    run_on(two_nodes(paced_links=True), Start(script, ["4"], tmp_path / "run"), Kept())
    due = [json.loads(line)["due_s"] for line in record_path(lab_dir(tmp_path / "run"), 0).read_text().splitlines()]
    size = 4 * (256 * 256 + 256)
    assert due == pytest.approx([0.018 + (4 / 3) * size * 8 / 100e6 + 4 * 0.003] * 4)


@launches
@quotas
def test_a_worker_alone_under_a_quota(tmp_path, script):
    cluster = Cluster(
        "q", "", (WorkerSpec(cores=1.0), WorkerSpec(cores=0.5)), mechanism="cgroup", nodes=(Node("n", 2),)
    )
    solo = measure(cluster, 1, Start(script, ["100"], tmp_path, most_steps=12), Kept())
    assert solo.worker == 1
    assert solo.samples == 8
    assert solo.samples_per_s > 0
    records = record_path(lab_dir(tmp_path / "alone-0001"), 1).read_text().splitlines()
    assert len(records) == 12  # the script would have made 100
    assert not list(cgroup.find(Path("/proc/self/mounts").read_text()).root.glob(f"paceline-{os.getpid()}-*"))


@launches
def test_memory_is_capped(tmp_path):
    path = tmp_path / "eats.py"
    path.write_text("import torch\nprint(len([torch.ones(2**20) for _ in range(64)]))")
    small = Cluster("m", "", (WorkerSpec(memory_mib=100),), nodes=(Node("n", 1),))
    with pytest.raises(LaunchError, match="memory"):
        run_on(small, Start(path, [], tmp_path / "small"), Kept())
    large = Cluster("m", "", (WorkerSpec(memory_mib=600),), nodes=(Node("n", 1),))
    screen = Kept()
    run_on(large, Start(path, [], tmp_path / "large"), screen)
    assert screen.text == "64\n"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["interrupted", "ended", "killed"])
def test_a_lab_that_is_ended_leaves_nobody(how, tmp_path, script):
    """Hogs and workers end with the launcher; interrupted or ended it removes all else, killed the next start does."""
    text = """
[[nodes]]
name = "a"
link = { up_mbit = 100 }
[[nodes.workers]]
[[nodes]]
name = "b"
[[nodes.workers]]
per_sample_s = 0.01
[[disturbances]]
kind = "hog"
worker = 1
"""
    (tmp_path / "c.toml").write_text(text)
    extra = [] if netns.probe()[0] else ["--links", "paced"]
    command = [sys.executable, "-m", "paceline.cli", "lab", "run", "--cluster", "c.toml", *extra, "--run-dir", "run"]
    lab = subprocess.Popen([*command, str(script), "100000"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        record = record_path(lab_dir(tmp_path / "run"), 1)
        wait_for(lambda: record.exists() and record.read_text().count("\n") > 2, "steps")
        pids = [int(pid_path(lab_dir(tmp_path / "run"), worker).read_text()) for worker in range(2)]
        hogs = ["pgrep", "-P", str(lab.pid), "-f", "paceline.lab.hog"]
        wait_for(lambda: subprocess.run(hogs, capture_output=True).stdout, "a hog")
        pids += [int(pid) for pid in subprocess.run(hogs, capture_output=True).stdout.split()]
        made = netns_of(lab.pid)
        assert bool(made) == (not extra)
        lab.send_signal(how)
        assert lab.wait(timeout=60) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(how, -how)
        if how != signal.SIGKILL:
            assert not netns_of(lab.pid)
        wait_for(
            lambda: not any(Path(f"/proc/{pid}").exists() and state_of(pid) != "Z" for pid in pids), "workers gone"
        )
        clean()
        assert not netns_of(lab.pid)
    finally:
        lab.kill()
        lab.wait()
