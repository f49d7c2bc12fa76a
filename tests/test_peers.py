"""Environments of peers, and, when asked for, every peer training in its own.

Run as a script this file is one worker of such a training: `test_peers.py PEER OUT`, started by torchrun.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.bench import peers
from paceline.bench.task import Rows, Task
from paceline.errors import ConfigError, PacelineError

NUM_WORKERS, NUM_STEPS, SEED = 2, 30, 3


@pytest.fixture
def offline(monkeypatch):
    """pip finds nothing but what is installed; `offline(NAME, REQUIREMENT...)` makes it a peer."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return lambda name, *requirements: monkeypatch.setitem(peers.PEERS, name, requirements)


@pytest.mark.parametrize("name", sorted(peers.PEERS))
def test_a_peer_has_a_contender_and_exact_versions(name):
    assert importlib.util.find_spec(f"paceline.bench.contenders.{name}")
    assert all("==" in requirement for requirement in peers.PEERS[name])


def test_an_unknown_peer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'torchft'"):
        peers.environment("torchfd", tmp_path)


def test_pip_failing_says_why_and_leaves_nothing(offline, tmp_path):
    offline("ghost", "paceline-peer-that-does-not-exist==1.0")
    with pytest.raises(peers.PeerMissing, match="No matching distribution") as caught:
        peers.environment("ghost", tmp_path)
    assert isinstance(caught.value, PacelineError)
    assert caught.value.name == "ghost"
    assert "paceline-peer-that-does-not-exist" in caught.value.reason
    assert not (tmp_path / "ghost").exists()


def test_another_torch_is_refused(offline, tmp_path):
    offline("old", "torch==2.0.0")
    with pytest.raises(peers.PeerMissing, match="constraint"):
        peers.environment("old", tmp_path)


def test_pip_taking_too_long_is_said(offline, tmp_path, monkeypatch):
    offline("slow", "click")
    monkeypatch.setattr(peers, "_PIP_TIMEOUT_S", 0.01)
    with pytest.raises(peers.PeerMissing, match=r"within 0\.01 s"):
        peers.environment("slow", tmp_path)


def test_made_once_and_anew_when_half_made_or_changed(offline, tmp_path):
    offline("light", "click")
    half = tmp_path / "light" / "bin" / "python"
    half.parent.mkdir(parents=True)
    half.write_text("what an interrupted installation left behind")

    python = peers.environment("light", tmp_path)
    shared = {name: importlib.metadata.version(name) for name in ("click", "torch")}
    assert python == half
    assert peers.versions("light", python) == shared
    found = subprocess.run(
        [python, "-c", "import importlib.util as u, sys; print(u.find_spec('torch').origin); print(sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [torch.__file__, str(tmp_path / "light")]

    witness = tmp_path / "light" / "witness"
    witness.touch()
    assert peers.environment("light", tmp_path) == python
    assert witness.exists()

    offline("light", "click", "rich")
    assert peers.environment("light", tmp_path) == python
    assert not witness.exists()


def test_two_at_once_make_one(offline, tmp_path, monkeypatch):
    offline("light", "click")
    made = []
    make = peers._make
    monkeypatch.setattr(peers, "_make", lambda *args: (made.append(1), make(*args)))
    both = [threading.Thread(target=peers.environment, args=("light", tmp_path)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(made) == 1
    assert peers.versions("light", tmp_path / "light" / "bin" / "python")["click"]


class Digits:
    """A small classifier of scikit-learn's digits; keeps the losses and the rows it was given."""

    name, batch_size, target, higher_is_better = "digits", 64, 0.8, True

    def __init__(self):
        self.losses, self.rows = [], []

    def data(self):
        from sklearn.datasets import load_digits

        x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
        x = x.float() / 16
        return Rows(x[:1500], y[:1500], torch.arange(1500)), Rows(x[1500:], y[1500:])

    def model(self):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    def loss(self, model, batch):
        x, y, rows = batch
        loss = nn.functional.cross_entropy(model(x), y)
        self.losses.append(loss.item())
        self.rows.append(rows)
        return loss

    def score(self, model, test):
        x, y = test.tensors
        return (model(x).argmax(1) == y).float().mean().item()


class Watched(Task):
    """A task that keeps the parameters after every step."""

    def stepped(self, module):
        self.states = [
            *getattr(self, "states", []),
            nn.utils.parameters_to_vector(module.parameters()).detach().clone(),
        ]
        return super().stepped(module)


def work(name: str, out: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    workload = Digits()
    task = Watched(workload, 64, NUM_STEPS, 10, SEED, rank, size, torch.device("cpu"), marks=out / "marks.jsonl")
    importlib.import_module(f"paceline.bench.contenders.{name}").train(task)
    torch.save({"losses": workload.losses, "rows": workload.rows, "states": task.states}, out / f"{rank}.pt")


def replay(steps_of_rows, start):
    """One process on the joined batches."""
    workload = Digits()
    torch.manual_seed(SEED)
    model = workload.model()
    if start is not None:
        nn.utils.vector_to_parameters(start.clone(), model.parameters())
    optimizer = workload.optimizer(model.parameters())
    train, _ = workload.data()
    for rows in steps_of_rows:
        optimizer.zero_grad()
        workload.loss(model, train.__getitems__(rows.tolist())).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def running_with(mark: str) -> list[str]:
    """Processes that inherited this environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().decode())
        except OSError:  # ended meanwhile, or not ours
            pass
    return found


@pytest.mark.skipif(os.environ.get("PACELINE_TEST_PEERS") != "1", reason="installs packages: set PACELINE_TEST_PEERS=1")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(peers.PEERS))
def test_a_peer_trains(name, tmp_path, tmp_path_factory):
    python = peers.environment(name, tmp_path_factory.mktemp("peers"))
    assert peers.versions(name, python)["torch"] == torch.__version__

    mark = f"PACELINE_TEST_MARK={uuid.uuid4()}"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS}"]
    done = subprocess.run(
        [python, *launch, __file__, name, tmp_path],
        env={**os.environ, **dict([mark.split("=")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert running_with(mark) == []

    ends = [torch.load(tmp_path / f"{rank}.pt") for rank in range(NUM_WORKERS)]
    assert all(torch.equal(end["states"][-1], ends[0]["states"][-1]) for end in ends)
    for end in ends:
        assert len(end["losses"]) == NUM_STEPS
        assert sum(end["losses"][-5:]) < 0.6 * sum(end["losses"][:5])
        assert {len(rows) for rows in end["rows"]} == {64 // NUM_WORKERS}
    joined = [torch.cat(rows) for rows in zip(*(end["rows"] for end in ends), strict=True)]
    num_epoch = 1500 // 64
    assert len(torch.cat(joined[:num_epoch]).unique()) == num_epoch * 64, "a row came twice in an epoch"

    # AdaptDL's learning-rate rule takes hold after the first step: see its contender.
    late = name == "adaptdl"
    alone = replay(joined[1:], ends[0]["states"][0]) if late else replay(joined, None)
    torch.testing.assert_close(ends[0]["states"][-1], alone, rtol=0, atol=1e-5)

    marks = [json.loads(line) for line in (tmp_path / "marks.jsonl").read_text().splitlines()]
    assert [mark["step"] for mark in marks if "score" not in mark] == list(range(1, NUM_STEPS + 1))
    assert sorted(path.name for path in tmp_path.glob("replica-*")) == [f"replica-{n}-0.pt" for n in (10, 20, 30)]


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
