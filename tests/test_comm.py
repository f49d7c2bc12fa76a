"""One conformance suite for every door to the network, and the faults of the double."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from paceline.comm import Comm, Fault, LoopbackWorld, TorchComm
from paceline.errors import DisagreementError, PeerLost, PeerTimeout
from paceline.runtime.handshake import agree, fingerprint
from tests import ranks


def in_threads(world, body):
    """Run body(comm) on every worker of a loopback world; values or errors, by rank."""
    out = [None] * world.size

    def one(rank):
        try:
            out[rank] = body(world.comm(rank))
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return out


def conform(comm):
    """What any Comm must do; run on every worker."""
    assert isinstance(comm, Comm)
    tensor = torch.full((5,), float(comm.rank + 1))
    pending = comm.sum_(tensor)
    pending.wait()
    assert tensor.tolist() == [sum(range(1, comm.size + 1))] * 5
    two = [comm.gather(torch.tensor([comm.rank, 10 * k], dtype=torch.float64)) for k in (1, 2)]
    for k, gathered in enumerate(two, start=1):
        assert gathered.wait().tolist() == [[rank, 10 * k] for rank in range(comm.size)]
    assert comm.gather_text("é" * comm.rank) == ["é" * rank for rank in range(comm.size)]
    buffers = [torch.full((2,), float(comm.rank)), torch.tensor([comm.rank])]
    comm.broadcast_(buffers)
    assert buffers[0].tolist() == [0.0, 0.0]
    assert buffers[1].item() == 0
    lanes = comm.open_lanes(2)
    assert lanes >= 2 or comm.size == 1
    tensors = [torch.full((3,), float(comm.rank + lane)) for lane in range(4)]
    for pending in [comm.sum_(tensor, lane) for lane, tensor in enumerate(tensors)]:
        pending.wait()
    expected = [sum(rank + lane for rank in range(comm.size)) for lane in range(4)]
    assert [tensor.tolist() for tensor in tensors] == [[value] * 3 for value in expected]
    if comm.size > 1:
        mine = torch.tensor([[10.0 * comm.rank + other] * 2 for other in range(comm.size)])
        theirs = torch.empty_like(mine)
        comm.swap(theirs, mine, 1).wait()
        assert theirs[:, 0].tolist() == [10.0 * other + comm.rank for other in range(comm.size)]
    comm.at(3, "computing")
    with comm.naming("nothing"):
        pass
    with pytest.raises(KeyError):
        with comm.naming("an error of ours"):
            raise KeyError
    comm.close(graceful=True)
    comm.close(graceful=True)
    return comm.rank


def on_torch(timeout_s=20):
    return conform(TorchComm(torch.device("cpu"), None, timeout_s))


@pytest.mark.parametrize("size", [1, 3])
def test_loopback_conforms(size):
    assert in_threads(LoopbackWorld(size), conform) == list(range(size))


@pytest.mark.parametrize("size", [1, 3])
def test_torch_conforms(size):
    assert ranks.run(size, on_torch) == list(range(size))


def test_a_world_of_one_needs_no_launcher():
    import subprocess
    import sys

    code = "from tests.test_comm import on_torch; on_torch()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_scripted_loss_reaches_everybody_and_fires():
    world = LoopbackWorld(3, faults=[Fault(1, "gather", 1, "lose")])

    def body(comm):
        for _ in range(3):
            comm.gather(torch.zeros(1, dtype=torch.float64)).wait()

    out = in_threads(world, body)
    assert [type(error) for error in out] == [PeerLost] * 3
    assert out[0].missing == (1,)
    assert world.fired == world.faults


def test_scripted_delay_and_timeout():
    world = LoopbackWorld(2, faults=[Fault(1, "sum_", 0, "delay", 0.6)], timeout_s=0.2)
    out = in_threads(world, lambda comm: comm.sum_(torch.zeros(1)).wait())
    assert isinstance(out[0], PeerTimeout)
    assert out[0].missing == (1,)
    assert out[1] is None
    assert world.fired == world.faults


def silent_rank():
    """Rank 1 stops taking part; the others must say so by name."""
    comm = TorchComm(torch.device("cpu"), None, 3.0)
    comm.at(7, "computing")
    if comm.rank == 1:
        time.sleep(9)
        return None
    try:
        comm.sum_(torch.zeros(4)).wait()
    except PeerTimeout as error:
        return str(error), error.missing


def test_a_timeout_names_who_is_alive_but_late():
    out = ranks.outcomes(3, silent_rank, timeout_s=40)
    for rank in (0, 2):
        message, missing = out[rank].value
        assert missing == (1,)
        assert "the gradient sum did not finish within 3 s" in message
        assert "worker 1" in message
        assert "is alive but has not arrived: at step 7, computing" in message


def killed_rank():
    """Rank 2 dies without a word."""
    import os
    import signal

    comm = TorchComm(torch.device("cpu"), None, 20.0)
    comm.at(4, "computing")
    comm.sum_(torch.zeros(4)).wait()
    if comm.rank == 2:
        time.sleep(1.5)  # long enough for a pulse that says where it was
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.sum_(torch.zeros(4)).wait()
    except PeerLost as error:
        return str(error), error.missing


def test_a_killed_worker_is_named_at_once():
    out = ranks.outcomes(3, killed_rank, timeout_s=40)
    assert out[2].exit_code == -9
    for rank in (0, 1):
        message, missing = out[rank].value
        assert missing == (2,)
        assert "gives no sign of life; last seen at step 4" in message


def test_who_does_not_start_is_named():
    out = ranks.outcomes(3, late_start, timeout_s=60)
    for rank in (0, 2):
        assert out[rank].kind == "PeerTimeout"
        assert "3 workers should start, but worker 1 did not within 3 s" in out[rank].error


def late_start():
    import os

    if os.environ["RANK"] == "1":
        time.sleep(8)
        return None
    TorchComm(torch.device("cpu"), None, 3.0)


def test_disagreement_names_the_odd_one_the_field_and_both_values():
    def body(comm):
        agree(comm, "settings", {"seed": 5 if comm.rank == 2 else 1, "same": True, "_free": comm.rank})

    for error in in_threads(LoopbackWorld(4), body):
        assert isinstance(error, DisagreementError)
        assert "worker 2 has seed=5, the others have seed=1" in str(error)


def test_without_a_majority_worker_0_is_the_measure():
    errors = in_threads(LoopbackWorld(2), lambda comm: agree(comm, "settings", {"seed": comm.rank}))
    assert "worker 1 has seed=1, the others have seed=0" in str(errors[0])


def test_fingerprints():
    from torch.utils.data import TensorDataset

    a, b = torch.arange(10.0), torch.arange(10.0) + 1
    assert fingerprint(TensorDataset(a)) == fingerprint(TensorDataset(a.clone()))
    assert fingerprint(TensorDataset(a)) != fingerprint(TensorDataset(b))

    class Own:
        fingerprint = "mine"

    class Labelled:
        def __init__(self, targets):
            self.targets = targets

    assert fingerprint(Own()) == "mine"
    assert fingerprint(Labelled([1, 2])) != fingerprint(Labelled([1, 3]))
