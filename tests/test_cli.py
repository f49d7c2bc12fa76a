"""The command line, used as a person uses it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.events import events_path, read

TRAIN = """
import sys, torch, torch.nn.functional as F
import paceline

pace = paceline.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = pace.wrap(model, optimizer)
x = torch.randn(96, 8)
dataset = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
loader = pace.loader(dataset, batch_size=24)
for epoch in range(int(sys.argv[1])):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        EXTRA
print(f"rank {pace.rank} policy {pace.settings.policy.name} arguments {sys.argv[1:]}")  # in one piece: two workers share a pipe
"""


def script(folder: Path, extra: str = "pass", name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(TRAIN.replace("EXTRA", extra))
    return path


def paceline(*arguments, cwd, timeout=90, **kwargs):
    command = [sys.executable, "-m", "paceline.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, **kwargs)


def children_of(pid: int) -> set[int]:
    out = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in out.splitlines()]
    found, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in pairs if parent in frontier} - found
        found |= frontier
    return found


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found.add(pid)
    return found


def test_run(tmp_path):
    done = paceline(
        "run", "--nproc", 2, "--balance", "dbs", "--run-dir", "out", script(tmp_path), "2", "--x", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 policy dbs arguments ['2', '--x']\n"  # worker 0's output, and nothing else
    assert "done; events and logs are in" in done.stderr
    start, *_, end = read(events_path(tmp_path / "out", 1))
    assert start["sources"] == {"balance": "command line", "run_dir": "command line"}
    assert end["ok"] is True
    assert list((tmp_path / "out" / "logs").glob("*/*/attempt_0/1/stdout.log"))


def test_run_without_a_folder_makes_a_dated_one(tmp_path):
    (tmp_path / "train.py").write_text("print('nothing to train')\n")
    done = paceline("run", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-train")


def test_plain_torchrun_works_too(tmp_path):
    env = {**os.environ, "PACELINE_RUN_DIR": str(tmp_path / "out")}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script(tmp_path)),
        "2",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d)", done.stdout)) == ["0", "1"]  # both print; lines may run into each other
    assert next(iter(read(events_path(tmp_path / "out", 0))))["sources"]["run_dir"] == "environment"


def test_two_machines_by_flags(tmp_path):
    """Two launchers on this machine meet as two nodes would."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # held here: nobody can take the port
    path = script(tmp_path)
    flags = [
        "--nnodes",
        "2",
        "--nproc",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{store.port}",
        "--rdzv-id",
        "job",
    ]
    command = [sys.executable, "-m", "paceline.cli", "run", *flags]
    nodes = [
        subprocess.Popen(
            [*command, "--run-dir", "out", str(path), "1"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=90) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sorted(out.split()[1] for out, _ in outputs) == ["0", "1"]


def test_the_first_failure_is_last_on_the_screen_and_alone(tmp_path):
    extra = "assert not (pace.rank == 1 and loader.step == 5), 'worker 1 gives up'"
    done = paceline("run", "--nproc", 3, "--run-dir", "out", script(tmp_path, extra), "9", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.rstrip().splitlines()
    assert done.stderr.count("Traceback") == 1
    assert any("AssertionError: worker 1 gives up" in line for line in lines[-5:])
    assert lines[-2] == "worker 1 failed with exit code 1."
    assert lines[-1].startswith("Its whole output: ")
    assert Path(lines[-1].removeprefix("Its whole output: ")).is_dir()


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("__import__('os').kill(__import__('os').getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_first_failing_workers(tmp_path, end, code):
    extra = f"{end} if pace.rank == 1 and loader.step == 3 else None"
    done = paceline("run", "--nproc", 2, "--run-dir", "out", script(tmp_path, extra), "9", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "worker 1" in done.stderr.splitlines()[-2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "none.py"], "the script must be a file: there is no none.py"),
        (["run", "--nproc", "0", "train.py"], "nproc must be at least 1, got 0"),
        (["run", "--balance", "afine", "train.py"], "did you mean 'affine'"),
        (["run", "--sync", "overlp", "train.py"], "did you mean 'overlap'"),
        (["run", "--batch", "noise-scal", "train.py"], "did you mean 'noise-scale'"),
        (["run", "--batch", "norm-test:eta=1", "train.py"], "eta = 1 would never grow it"),
        (["run", "--lr-rule", "lin", "train.py"], "learning-rate rule"),
        (["run", "--recipe", "adaptive-locl", "train.py"], "did you mean 'adaptive-local'"),
        (["run", "--sync", "overlap:h=0", "train.py"], "H must be a whole number, at least 1; got 0"),
        (["run", "--run-dir", "train.py/x", "train.py"], "the run folder must be writable"),
        (["run", "--nnodes", "2", "train.py"], "each needs its own --node-rank"),
        (["run", "--max-local-batch", "1,x", "train.py"], "one whole number, or one per worker"),
        (["run", "--nprok", "2", "train.py"], "No such option"),
        (["lab", "run", "--cluster", "none.toml", "train.py"], "there is no cluster file none.toml"),
        (["lab", "run", "--cluster", "four-unlik", "train.py"], "did you mean 'four-unlike'"),
        (["lab", "run", "--cluster", "bad.toml", "train.py"], "speed must be a number above 0, got -2"),
        (["lab", "run", "--cluster", "four-equal", "none.py"], "there is no none.py"),
        (["bench", "slow-link", "--contenders", "ddp,overlap:h=8,delay=2"], "got 'overlap:h=8,delay=2'"),
        (["demo", "--run-dir", "train.py/x"], "the run folder must be writable"),
        (["demo", "--steps", "3"], "3 is not in the range"),
        (["rum"], "No such command"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, arguments, message):
    script(tmp_path)
    (tmp_path / "bad.toml").write_text("[[workers]]\nspeed = -2\n")
    done = paceline(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_interrupt_leaves_nobody_behind(tmp_path, moment):
    path = script(tmp_path, "__import__('time').sleep(0.05)")
    command = [sys.executable, "-m", "paceline.cli", "run", "--nproc", "2", "--run-dir", "out", str(path), "500"]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        family = children_of(launcher.pid)
        events = events_path(tmp_path / "out", 0)
        if moment == "starting" and len(family) >= 2:
            break
        if moment == "training" and events.exists() and "window" in events.read_text():
            break
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not alive(family)
    if moment == "training":  # what was logged is whole
        assert next(event["type"] for event in read(events)) == "start"


def test_a_killed_launcher_takes_its_workers_along(tmp_path):
    path = script(tmp_path, "__import__('time').sleep(0.05)")
    command = [sys.executable, "-m", "paceline.cli", "run", "--nproc", "2", "--run-dir", "out", str(path), "500"]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    events = events_path(tmp_path / "out", 0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (events.exists() and "window" in events.read_text()):
        time.sleep(0.1)
    family = children_of(launcher.pid)
    assert len(family) >= 2
    launcher.kill()
    launcher.wait(30)
    deadline = time.monotonic() + 30
    while alive(family) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(family)


CLUSTER = """
name = "two"
fixed_s = 0.01
per_sample_s = 0.004
[[workers]]
speed = 3
[[workers]]
max_local_batch = 16
"""


@pytest.mark.xdist_group("lab")
def test_lab_run_paces_an_untouched_script(tmp_path):
    (tmp_path / "two.toml").write_text(CLUSTER)
    path = script(tmp_path)
    done = paceline("lab", "run", "--cluster", "two.toml", "--run-dir", "out", "--json", path, "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["mechanism"] == "paced"
    assert figures["steps"] == 16
    assert 0 < figures["share_of_limit"] <= 1.05
    records = [
        [json.loads(line) for line in (tmp_path / "out" / "lab" / f"worker-000{w}.jsonl").read_text().splitlines()]
        for w in range(2)
    ]
    for worker, speed in ((0, 3), (1, 1)):
        for record in records[worker]:
            assert record["due_s"] == pytest.approx(0.01 + 0.004 / speed * record["samples"])
            assert record["took_s"] >= record["due_s"] - 1e-4  # never faster than the cluster file says
    assert all(a["samples"] + b["samples"] == 24 for a, b in zip(*records, strict=True))
    assert all(b["samples"] <= 16 for b in records[1])
    assert records[0][-1]["samples"] > records[0][0]["samples"]  # the fast worker took over
    again = paceline("lab", "run", "--cluster", "two.toml", "--run-dir", "out", path, "4", cwd=tmp_path)
    assert again.returncode == 2
    assert "holds the record of an earlier run" in again.stderr


@pytest.mark.xdist_group("lab")
def test_lab_limit_asks_for_nothing_that_a_worker_alone_does_not_need(tmp_path):
    """Paced links cannot drop, but alone there is no link; nor is there an exchange to wait for."""
    text = CLUSTER.replace("[[workers]]", "[[nodes]]\nname = 'a'\nlink = { latency_ms = 500 }\n[[nodes.workers]]", 1)
    text = text.replace("[[workers]]", "[[nodes]]\nname = 'b'\n[[nodes.workers]]")
    (tmp_path / "c.toml").write_text(text + "[[disturbances]]\nkind = 'drop'\nnode = 'a'\n")
    path = script(tmp_path)
    done = paceline("lab", "limit", "--cluster", "c.toml", "--steps", 10, "--json", path, "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["samples"] for one in found["workers"]] == [24, 24]  # the batch the script asks for
    assert found["samples_per_s"] == pytest.approx(sum(one["samples_per_s"] for one in found["workers"]))
    for worker in range(2):
        lines = (
            (tmp_path / found["run_dir"] / f"alone-000{worker}/lab/worker-000{worker}.jsonl").read_text().splitlines()
        )
        assert all(json.loads(line)["due_s"] < 0.5 for line in lines)


def test_lab_clusters_lists_what_ships(tmp_path):
    done = paceline("lab", "clusters", cwd=tmp_path)
    assert done.returncode == 0
    assert "four-unlike" in done.stdout
    assert "slowed-midway" in done.stdout


@pytest.mark.xdist_group("bench")
@pytest.mark.timeout(200)
def test_demo(tmp_path):
    done = paceline("demo", "--steps", 24, "--json", "--run-dir", "out", cwd=tmp_path, timeout=110)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [one["name"] for one in result["contenders"]] == ["plain DDP", "hand-tuned DDP", "paceline"]
    for one in result["contenders"]:
        assert one["samples_per_s"] > 0
        assert 0 < one["share_of_limit"] <= 1.05
        assert 0.2 < one["final_accuracy"] <= 1
    picture = Path(result["picture"]).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert "has ended: 4 workers" in Path(result["report"]).read_text()
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result


def test_help_of_every_command():
    from click.testing import CliRunner

    from paceline.cli import cli

    for command in (
        (),
        ("run",),
        ("lab",),
        ("lab", "run"),
        ("lab", "clusters"),
        ("lab", "limit"),
        ("lab", "probe"),
        ("bench",),
        ("bench", "run"),
        ("demo",),
    ):
        done = CliRunner().invoke(cli, [*command, "--help"], prog_name="paceline")
        assert done.exit_code == 0
        assert done.output.startswith("Usage: paceline")
