"""Local training over emulated links: nodes from the cluster file, bytes on the wire, and a link that dies in mid-exchange."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.comm.launch import Silent
from paceline.errors import LaunchError
from paceline.events import events_path, read
from paceline.lab import netns
from paceline.lab.cluster import Cluster, Disturbance, Link, Node, WorkerSpec
from paceline.lab.start import Start, run_on
from paceline.runtime import checkpoint

READY, WHY = netns.probe()
pytestmark = [
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(not READY, reason=f"no network namespaces here: {WHY}"),
]

SCRIPT = """
import sys, torch, paceline
import torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(4096, 20)
data = torch.utils.data.TensorDataset(x, (x @ torch.randn(20, 4)).argmax(1))
pace = paceline.init(timeout_s=15, balance="equal")
model = torch.nn.Sequential(torch.nn.Linear(20, 400), torch.nn.ReLU(), torch.nn.Linear(400, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = pace.wrap(model, optimizer)
loader = pace.loader(data, 16)
while loader.step < int(sys.argv[1]):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if loader.step % 10 == 0:
            pace.save(sys.argv[2])
        if loader.step >= int(sys.argv[1]):
            break
"""


def cluster(disturbances: tuple[Disturbance, ...] = ()) -> Cluster:
    return Cluster(
        "three",
        "",
        (WorkerSpec(fixed_s=0.02),) * 3,
        disturbances,
        nodes=(Node("near", 2, Link(100, 100, 2)), Node("far", 1, Link(100, 100, 2))),
    )


def play(tmp_path: Path, spec: Cluster, steps: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {"PACELINE_SYNC": "overlap:h=4,delay=2", "PACELINE_RUN_DIR": str(tmp_path)}
    run_on(spec, Start(script, [str(steps), str(tmp_path / "check")], tmp_path, env), Silent())


def test_nodes_come_from_the_cluster_file(tmp_path):
    play(tmp_path, cluster(), 24)
    events = list(read(events_path(tmp_path, 0)))
    (topology,) = (event for event in events if event["type"] == "topology")
    assert topology["names"] == ["near", "far"]
    assert topology["members"] == [[0, 1], [2]]
    rounds = [event for event in events if event["type"] == "round"]
    assert rounds
    values = 20 * 400 + 400 + 400 * 4 + 4
    assert all(event["num_bytes"] == pytest.approx(4 * values, rel=0.01) for event in rounds)  # half of it, twice


def test_a_link_that_dies_ends_the_run_and_names_the_node(tmp_path):
    with pytest.raises(LaunchError):
        play(tmp_path, cluster((Disturbance("drop", node=1, from_step=25),)), 4000)
    log = "\n".join(
        path.read_text(errors="replace") for path in sorted((tmp_path / "logs").rglob("*")) if path.is_file()
    )
    assert "did not finish within 15 s on worker 0. Missing: worker 2 (far, pid" in log
    assert checkpoint.read(tmp_path / "check")["loader"]["step"] in (10, 20)
