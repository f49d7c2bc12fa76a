"""Emulated links: what the kernel really does with bytes, time and leftovers."""

from __future__ import annotations

import dataclasses
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import ConfigError, LaunchError
from paceline.lab import netns, owner
from paceline.lab.cluster import Link
from paceline.lab.netns import Network, clean, plan, probe
from paceline.lab.relay import delays_s

pytestmark = pytest.mark.xdist_group("lab")  # they look at what others left on the machine
CAN, WHY = probe()
real = pytest.mark.skipif(not CAN, reason=WHY)
PYTHON = [sys.executable, "-I", "-S", "-c"]

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
peer = server.accept()[0]
while data := peer.recv(65536):
    peer.sendall(data)
"""
ROUND_TRIP = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
times = []
for _ in range(4):
    begun = time.monotonic()
    peer.sendall(b"x")
    peer.recv(1)
    times.append(time.monotonic() - begun)
print(min(times))
"""
RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
peer, count = server.accept()[0], 0
while data := peer.recv(1 << 20):
    count += len(data)
print(count, time.monotonic())
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print(time.monotonic())
peer.sendall(bytes(int(sys.argv[3])))
"""
ASK = """
import select, socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for line in sys.stdin:
    verb, seconds = line.split()
    if verb == "send":
        peer.sendall(b"x")
    heard = select.select([peer], [], [], float(seconds))[0]
    print("echo" if heard and peer.recv(1) else "silence", flush=True)
"""
REDUCE = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
rank, address = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
port = 0 if rank == 0 else int(sys.stdin.readline())
store = dist.TCPStore(address, port, 2, rank == 0, timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
tensor = torch.full((500_000,), rank + 1.0)
dist.barrier()
begun = time.monotonic()
dist.all_reduce(tensor)
print(time.monotonic() - begun, tensor.min().item(), tensor.max().item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
LAUNCHER = """
import subprocess, sys
from paceline.lab.cluster import Link
from paceline.lab.netns import Network
with Network([Link(latency_ms=1), Link()]) as network:
    command = [*network.prefix(0), "sh", "-c", "echo there; exec sleep 1000"]
    sleeper = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    sleeper.stdout.readline()  # it has entered the namespace
    print(sleeper.pid, network._relay.pid if network._relay else 0, network.plan.hub, *network.plan.namespaces, flush=True)
    sys.stdin.read()
"""


def start(prefix: Sequence[str], script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, *PYTHON, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def between(network: Network, server: str, client: str, a: int, b: int, *arguments: str) -> tuple[str, str]:
    """What a client on node a and its server on node b say, at their end."""
    with start(network.prefix(b), server, network.address(b)) as serving:
        port = serving.stdout.readline().strip()
        with start(network.prefix(a), client, network.address(b), port, *arguments) as asking:
            said = asking.communicate(timeout=30)[0]
        return said, serving.communicate(timeout=30)[0]


def round_trip_s(network: Network, a: int, b: int) -> float:
    return float(between(network, ECHO, ROUND_TRIP, a, b)[0])


def names() -> list[str]:
    """Namespaces of this process."""
    return [path.name for path in netns.RUN_DIR.glob(f"{owner.tag()}-*")]


def ends(pidfd: int) -> bool:
    """Whether a process ends within a few seconds."""
    return bool(select.select([pidfd], [], [], 10)[0])


# The plan


def test_a_plan_with_relay():
    made = plan([Link(100, 1000, 15), Link()], "t", netem=False)
    window = "4096 131072 67108864"
    assert [" ".join(command) for command in made.build] == [
        "ip netns add t-hub",
        "ip netns add t-n0",
        "ip netns add t-n1",
        "ip netns exec t-hub sh -ec echo 1 > /proc/sys/net/ipv4/ip_forward; "
        "echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter; echo 0 > /proc/sys/net/ipv4/conf/default/rp_filter",
        "ip -n t-hub tuntap add tun0 mode tun vnet_hdr",
        "ip -n t-hub link set tun0 txqueuelen 10000 up",
        "ip -n t-hub route add default dev tun0 table 100",
        f"ip netns exec t-n0 sh -ec echo {window} > /proc/sys/net/ipv4/tcp_rmem; "
        f"echo {window} > /proc/sys/net/ipv4/tcp_wmem",
        "ip -n t-hub link add v0 type veth peer name eth0 netns t-n0",
        "ip -n t-hub address add 10.77.0.1/30 dev v0",
        "ip -n t-n0 address add 10.77.0.2/30 dev eth0",
        "tc -n t-hub qdisc add dev v0 root handle 10: tbf rate 1000000000bit burst 250000b limit 10000000b",
        "tc -n t-n0 qdisc add dev eth0 root handle 10: tbf rate 100000000bit burst 25000b limit 1000000b",
        "ip -n t-n0 link set lo up",
        "ip -n t-hub link set v0 up",
        "ip -n t-n0 link set eth0 up",
        "ip -n t-n0 route add default via 10.77.0.1",
        "ip -n t-hub rule add priority 100 iif v0 lookup 100",
        "ip -n t-hub route add 10.77.0.2 dev tun0 table 101",
        f"ip netns exec t-n1 sh -ec echo {window} > /proc/sys/net/ipv4/tcp_rmem; "
        f"echo {window} > /proc/sys/net/ipv4/tcp_wmem",
        "ip -n t-hub link add v1 type veth peer name eth0 netns t-n1",
        "ip -n t-hub address add 10.77.0.5/30 dev v1",
        "ip -n t-n1 address add 10.77.0.6/30 dev eth0",
        "ip -n t-n1 link set lo up",
        "ip -n t-hub link set v1 up",
        "ip -n t-n1 link set eth0 up",
        "ip -n t-n1 route add default via 10.77.0.5",
        "ip -n t-hub rule add priority 100 iif v1 lookup 101",
    ]
    assert [" ".join(command) for command in made.undo] == [
        "ip netns delete t-n0",
        "ip netns delete t-n1",
        "ip netns delete t-hub",
    ]
    assert made.relay is not None
    assert made.relay[:5] == ("ip", "netns", "exec", "t-hub", sys.executable)
    assert made.relay[-3:] == ("tun0", "10.77.0.2=15", "10.77.0.6=0")
    assert [" ".join(command) for command in made.drop(1)] == [
        "ip -n t-hub rule add priority 10 iif v1 blackhole",
        "ip -n t-hub rule add priority 10 to 10.77.0.6 blackhole",
    ]
    assert made == plan([Link(100, 1000, 15), Link()], "t", netem=False)


def test_a_plan_with_netem():
    made = plan([Link(100, None, 15), Link(None, 0.5)], "t", netem=True)
    assert made.relay is None
    assert not [command for command in made.build if "tun0" in command or "rule" in command]
    assert [" ".join(command) for command in made.build if command[0] == "tc"] == [
        "tc -n t-hub qdisc add dev v0 root handle 1: netem delay 15ms limit 1000000",
        "tc -n t-n0 qdisc add dev eth0 root handle 1: netem delay 15ms limit 1000000",
        "tc -n t-n0 qdisc add dev eth0 parent 1:1 handle 10: tbf rate 100000000bit burst 25000b limit 1000000b",
        "tc -n t-hub qdisc add dev v1 root handle 10: tbf rate 500000bit burst 3200b limit 131072b",
    ]


@pytest.mark.parametrize("netem", [False, True])
def test_a_plan_without_latency_needs_neither(netem):
    made = plan([Link(10, 10)] * 70, "t", netem)
    assert made.relay is None
    assert not {"tun0", "netem", "rule"} & {word for command in made.build for word in command}
    assert len(set(made.addresses)) == 70
    assert made.addresses[69] == "10.77.1.22"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"up_mbit": 0}, "up_mbit must be above 0, got 0"),
        ({"down_mbit": float("nan")}, "down_mbit must be above 0, got nan"),
        ({"latency_ms": -1}, "latency_ms must be at least 0, got -1"),
    ],
)
def test_a_link_that_breaks_a_rule(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Link(**arguments)


def test_a_network_that_breaks_a_rule():
    with pytest.raises(ConfigError, match="1 to 16384 nodes, got 0"):
        plan([], "t", netem=False)
    with pytest.raises(ConfigError, match="enter it first"):
        Network([Link()]).address(0)


def test_a_packet_takes_both_latencies():
    delays = delays_s({"10.77.0.2": 10, "10.77.0.6": 2.5})
    assert sorted(delays.values()) == pytest.approx([0.005, 0.0125, 0.0125, 0.02])


# Owners


def test_whose_a_name_is():
    prefix, pid, began = owner.tag().split("-")
    assert prefix == "paceline"
    assert int(pid) == os.getpid()
    assert owner.owner_alive(f"{owner.tag()}-0-hub") is True
    assert owner.owner_alive(f"paceline-{pid}-{int(began) + 1}-0-hub") is False
    for foreign in ("docker0", "paceline", "paceline-1-x", f"my-{owner.tag()}", f"{owner.tag()}x"):
        assert owner.owner_alive(foreign) is None


def test_a_zombie_owns_nothing():
    with subprocess.Popen([*PYTHON, "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        name = f"paceline-{child.pid}-{stat.rpartition(')')[2].split()[19]}"
        assert owner.owner_alive(name)
        os.kill(child.pid, 9)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert owner.owner_alive(name) is False


# What can be done


def test_what_is_missing_is_said(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        patch.setattr(netns.shutil, "which", lambda program: program)
        assert probe() == (False, "needs root: run with sudo, or use --links paced, which needs none of this")
    monkeypatch.setenv("PATH", "")
    assert probe()[0] is False
    assert "install iproute2" in probe()[1]


@real
def test_a_probe_leaves_nothing():
    assert probe() == (CAN, WHY)
    assert names() == []


# What the links do


@real
@pytest.mark.parametrize("links", [(Link(up_mbit=80), Link()), (Link(), Link(down_mbit=80))], ids=["up", "down"])
def test_a_shaped_rate(links):
    with Network(links) as network:
        sent, received = between(network, RECEIVE, SEND, 0, 1, "4000000")
        count, ended = received.split()
        assert int(count) == 4_000_000
        mbit = 4 * 8 / (float(ended) - float(sent))
        assert mbit < 80, mbit  # headers and waiting only ever slow it down


@real
def test_latency_by_pair():
    with Network([Link(latency_ms=15), Link(latency_ms=15), Link(), Link()]) as network:
        assert round_trip_s(network, 0, 1) >= 0.060
        assert round_trip_s(network, 2, 0) >= 0.030
        assert round_trip_s(network, 2, 3) < 0.030  # far above what it takes here, below what latency would make of it


@real
def test_gloo_crosses_the_link():
    num_bytes = 2_000_000
    with Network([Link(100, 100), Link(100, 100)]) as network:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONWARNINGS": "ignore"}
        ranks = [
            subprocess.Popen(
                [*network.prefix(rank), sys.executable, "-c", REDUCE, str(rank), network.address(0)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        with ranks[0], ranks[1]:
            port = ranks[0].stdout.readline()
            said = [rank.communicate(port, timeout=60)[0].splitlines()[-1].split() for rank in reversed(ranks)]
        assert [(float(low), float(high)) for _, low, high in said] == [(3.0, 3.0)] * 2
        least_s = (num_bytes * 8 - 2 * 8 * 25_000) / 100e6  # each sends half twice; two bursts are free
        assert max(float(took) for took, _, _ in said) >= least_s
        for node in range(2):
            up, down = network.crossed(node)
            assert up >= num_bytes
            assert down >= num_bytes


@real
@pytest.mark.parametrize("latency_ms", [0, 2])
def test_a_dropped_link_is_silent_and_comes_back(latency_ms):
    with Network([Link(latency_ms=latency_ms), Link()]) as network:
        with start(network.prefix(1), ECHO, network.address(1)) as server:
            port = server.stdout.readline().strip()
            with start(network.prefix(0), ASK, network.address(1), port) as client:

                def ask(line: str) -> str:
                    client.stdin.write(line + "\n")
                    client.stdin.flush()
                    return client.stdout.readline().strip()

                assert ask("send 20") == "echo"
                for node in (0, 1):
                    network.drop(node)
                    network.drop(node)
                    assert ask("send 0.3") == "silence"
                    network.restore(node)
                    network.restore(node)
                    assert ask("wait 20") == "echo"  # TCP sends it again
                client.stdin.close()


@real
def test_the_host_is_not_touched():
    def host() -> list[str]:
        shown = [["link"], ["address"], ["rule"], ["route", "show", "table", "all"]]
        said = [subprocess.run(["ip", "-o", *what], capture_output=True, text=True).stdout for what in shown]
        return [*said, Path("/proc/sys/net/ipv4/ip_forward").read_text()]

    before = host()
    with Network([Link(10, 10, 1), Link()]):
        assert host()[0] == before[0]
        assert host()[2:] == before[2:]


# What is left


@real
def test_nothing_is_left_after_success_or_an_exception():
    with Network([Link(10, 10, 1), Link()]) as network, Network([Link()]) as second:
        assert len(names()) == 5
        assert network.address(0) == second.address(0)  # they cannot see each other
        inside = subprocess.Popen([*network.prefix(0), "sleep", "1000"])
    assert names() == []
    assert inside.wait(10) == -9
    with pytest.raises(KeyboardInterrupt):
        with Network([Link(10, 10, 1)]):
            raise KeyboardInterrupt
    assert names() == []


@real
def test_a_network_is_built_whole_or_not_at_all(monkeypatch):
    def broken(links: Sequence[Link], tag: str, netem: bool) -> netns.Plan:
        good = plan(links, tag, netem)
        return dataclasses.replace(good, build=(*good.build, ("ip", "-n", good.hub, "link", "set", "v9", "up")))

    monkeypatch.setattr(netns, "plan", broken)
    with pytest.raises(ConfigError, match=r"`ip -n paceline-\S+-hub link set v9 up`: Cannot find device"):
        Network([Link(10, 10)]).__enter__()
    assert names() == []


@real
def test_a_relay_that_does_not_start(monkeypatch):
    def broken(links: Sequence[Link], tag: str, netem: bool) -> netns.Plan:
        good = plan(links, tag, netem=False)
        return dataclasses.replace(good, relay=(*good.relay[:-1], "nonsense"))

    monkeypatch.setattr(netns, "plan", broken)
    with pytest.raises(ConfigError, match=r"(?s)relay.py tun0 .*ValueError.*latency_ms to 0"):
        Network([Link(latency_ms=1), Link()]).__enter__()
    assert names() == []


@real
def test_a_relay_that_dies_is_not_kept_quiet(monkeypatch):
    monkeypatch.setattr(netns, "_has_netem", lambda: False)
    network = Network([Link(latency_ms=1), Link()]).__enter__()
    network._relay.kill()
    network._relay.wait()
    with pytest.raises(LaunchError, match="ended early, exit code -9"):
        network.__exit__(None, None, None)
    assert names() == []


@real
def test_what_a_killed_launcher_leaves_is_removed_and_no_more():
    foreign = [f"not-{owner.tag()}", f"paceline-links-test-{os.getpid()}"]
    for name in foreign:
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        command = [sys.executable, "-c", LAUNCHER]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
            sleeper, relay, *theirs = launcher.stdout.readline().split()
            processes = [os.pidfd_open(int(pid)) for pid in (sleeper, relay) if pid != "0"]
            assert len(theirs) == 3
            assert not set(clean()) & set(theirs)  # its owner lives
            assert all((netns.RUN_DIR / name).exists() for name in theirs)
            launcher.kill()
        assert all(ends(process) for process in processes[1:])  # the relay dies with its launcher
        assert not select.select(processes[:1], [], [], 0)[0]
        clean()
        assert not set(theirs) & set(names())
        assert ends(processes[0])
        assert not [name for name in theirs if (netns.RUN_DIR / name).exists()]
        assert all((netns.RUN_DIR / name).exists() for name in foreign)
        for process in processes:
            os.close(process)
    finally:
        for name in foreign:
            subprocess.run(["ip", "netns", "delete", name], check=True)
