"""Links between the nodes of a cluster on one machine: Linux network namespaces, shaped by the kernel.

Every node is a namespace with one interface, `eth0`; all of them meet in one more, the hub, which routes between them:

    node 0: eth0 ──── v0 ┐         ┌ v1 ──── eth0 :node 1
                         └─ hub ───┘
                            tun0 ── relay

What leaves `eth0` is held to the node's `up_mbit` and what leaves its end in the hub to `down_mbit`, both by tbf. Latency is
netem's where the kernel has it. Where not, the hub sends the packets of distant nodes through `tun0` to a process that
holds them (`relay.py`). A routed hub does for both, and takes one plan where a bridge without latency would take a second.

The host's own namespace is neither used nor changed. Names begin with the launcher's tag (`owner.py`): what a killed
launcher leaves behind is found by it and removed at the next start.

`plan` decides which commands to run; `Network` runs them and always undoes them.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from paceline.errors import ConfigError, LaunchError
from paceline.lab import owner
from paceline.lab.cluster import Link

Argv = tuple[str, ...]
T = TypeVar("T")

RUN_DIR = Path("/var/run/netns")  # where `ip netns` keeps names
MAX_NODES = 16384  # a /30 each from 10.77.0.0/16
BURST_S = 0.002  # a timer that fires this late costs no bandwidth
MIN_BURST_BYTES = 3200  # two packets
QUEUE_S = 0.05  # what a link queues before it drops, beside one round trip
MIN_QUEUE_BYTES = 131072  # two joined segments of 64 kB
TCP_WINDOW = "4096 131072 67108864"  # the last, its limit in bytes, lets one connection fill 1 Gbit/s over 500 ms
NETEM_PACKETS = 1_000_000
ROUNDS = 20  # of killing what runs in a namespace, as a process may start another meanwhile
CUT, FAR, NEAR = "10", "100", "101"  # priority of the rules that cut a link; tables of distant nodes and of the others
WAY_OUT = "use --links paced, which needs none of this"
_networks = itertools.count()


@dataclass(frozen=True)
class Plan:
    """The commands that make a network, and what is where in it.

    Args:
        hub: namespace in which the nodes meet.
        namespaces: of the nodes.
        addresses: of the nodes.
        build: commands, in order.
        undo: commands that remove everything, whatever became of `build`.
        relay: command that must run meanwhile, if any.
    """

    hub: str
    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    build: tuple[Argv, ...]
    undo: tuple[Argv, ...]
    relay: Argv | None

    def drop(self, node: int) -> tuple[Argv, ...]:
        """Commands after which no packet of the node's passes the hub, and nobody is told."""
        return self._cut("add", node)

    def restore(self, node: int) -> tuple[Argv, ...]:
        """Commands that undo `drop`."""
        return self._cut("del", node)

    def _cut(self, verb: str, node: int) -> tuple[Argv, ...]:
        rule = ("ip", "-n", self.hub, "rule", verb, "priority", CUT)
        return (*rule, "iif", f"v{node}", "blackhole"), (*rule, "to", self.addresses[node], "blackhole")


def plan(links: Sequence[Link], tag: str, netem: bool) -> Plan:
    """The commands that join nodes with these links.

    Args:
        links: one per node.
        tag: what every name begins with.
        netem: whether the kernel has netem.
    """
    if not 1 <= len(links) <= MAX_NODES:
        raise ConfigError(f"a network has 1 to {MAX_NODES} nodes, got {len(links)}")
    hub = f"{tag}-hub"
    names = tuple(f"{tag}-n{node}" for node in range(len(links)))
    addresses = tuple(_address(node, 2) for node in range(len(links)))
    latencies = [link.latency_ms for link in links]
    relayed = any(latencies) and not netem
    build: list[Argv] = [("ip", "netns", "add", name) for name in (hub, *names)]
    build.append(_set(hub, ip_forward="1", **{"conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}))
    if relayed:
        build += [
            ("ip", "-n", hub, "tuntap", "add", "tun0", "mode", "tun", "vnet_hdr"),
            ("ip", "-n", hub, "link", "set", "tun0", "txqueuelen", "10000", "up"),
            ("ip", "-n", hub, "route", "add", "default", "dev", "tun0", "table", FAR),
        ]
    for node, (link, name) in enumerate(zip(links, names, strict=True)):
        end, delay_ms = f"v{node}", link.latency_ms if netem else 0.0
        others = latencies[:node] + latencies[node + 1 :]
        round_trip_s = 2 * (link.latency_ms + max(others, default=0.0)) / 1000
        build += [
            _set(name, tcp_rmem=TCP_WINDOW, tcp_wmem=TCP_WINDOW),
            ("ip", "-n", hub, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name),
            ("ip", "-n", hub, "address", "add", f"{_address(node, 1)}/30", "dev", end),
            ("ip", "-n", name, "address", "add", f"{addresses[node]}/30", "dev", "eth0"),
            *_shape(hub, end, link.down_mbit, delay_ms, round_trip_s),
            *_shape(name, "eth0", link.up_mbit, delay_ms, round_trip_s),
            ("ip", "-n", name, "link", "set", "lo", "up"),
            ("ip", "-n", hub, "link", "set", end, "up"),
            ("ip", "-n", name, "link", "set", "eth0", "up"),
            ("ip", "-n", name, "route", "add", "default", "via", _address(node, 1)),
        ]
        if relayed:
            table = FAR if link.latency_ms else NEAR
            build.append(("ip", "-n", hub, "rule", "add", "priority", FAR, "iif", end, "lookup", table))
            if link.latency_ms:  # all others reach this node through the relay, and one another without
                route = ("ip", "-n", hub, "route", "add", addresses[node], "dev", "tun0", "table", NEAR)
                build.append(route)
    undo = tuple(("ip", "netns", "delete", name) for name in (*names, hub))
    relay: Argv | None = None
    if relayed:
        script = str(Path(__file__).with_name("relay.py"))
        each = (f"{address}={latency:g}" for address, latency in zip(addresses, latencies, strict=True))
        relay = ("ip", "netns", "exec", hub, sys.executable, "-I", "-S", script, "tun0", *each)
    return Plan(hub, names, addresses, tuple(build), undo, relay)


def _address(node: int, host: int) -> str:
    return f"10.77.{node // 64}.{4 * (node % 64) + host}"


def _set(name: str, **values: str) -> Argv:
    """Kernel settings of a namespace, under /proc/sys/net/ipv4."""
    script = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{key}" for key, value in values.items())
    return "ip", "netns", "exec", name, "sh", "-ec", script


def _shape(name: str, device: str, mbit: float | None, delay_ms: float, round_trip_s: float) -> list[Argv]:
    """Commands that hold what leaves a device to a rate, after a delay."""
    add = ("tc", "-n", name, "qdisc", "add", "dev", device)
    commands: list[Argv] = []
    parent: Argv = ("root",)
    if delay_ms:
        commands.append(
            (*add, *parent, "handle", "1:", "netem", "delay", f"{delay_ms:g}ms", "limit", f"{NETEM_PACKETS}")
        )
        parent = ("parent", "1:1")
    if mbit is not None:
        bytes_per_s = mbit * 1e6 / 8
        burst = max(MIN_BURST_BYTES, round(bytes_per_s * BURST_S))
        queue = max(MIN_QUEUE_BYTES, round(bytes_per_s * (QUEUE_S + round_trip_s)))
        rate = ("rate", f"{round(mbit * 1e6)}bit", "burst", f"{burst}b", "limit", f"{queue}b")
        commands.append((*add, *parent, "handle", "10:", "tbf", *rate))
    return commands


class Network:
    """Nodes joined by these links, for as long as the context lasts.

    >>> with Network([Link(up_mbit=100), Link(latency_ms=10)]) as network:  # doctest: +SKIP
    ...     subprocess.run([*network.prefix(0), "ping", "-c1", network.address(1)])

    Enter it in a thread that lives as long as the context: the relay ends with the thread that started it.

    Args:
        links: one per node.

    Raises:
        ConfigError: on entering, a command failed, and all is undone.
        LaunchError: on leaving, the relay had ended early, so that packets were lost.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._plan: Plan | None = None
        self._relay: subprocess.Popen[str] | None = None
        self._dropped: set[int] = set()

    @property
    def plan(self) -> Plan:
        """What was built."""
        if self._plan is None:
            raise ConfigError("a network exists only inside its `with` block: enter it first")
        return self._plan

    def address(self, node: int) -> str:
        """The node's IPv4 address."""
        return self.plan.addresses[node]

    def prefix(self, node: int) -> list[str]:
        """What to put before a command so that it runs on the node."""
        # not `ip netns exec`, which mounts another /sys: cgroups would be out of sight
        return ["nsenter", f"--net=/run/netns/{self.plan.namespaces[node]}"]

    def crossed(self, node: int) -> tuple[int, int]:
        """Bytes that have come from the node, and that have gone to it, headers included."""
        command = ["ip", "-j", "-s", "-n", self.plan.hub, "link", "show", f"v{node}"]
        done = subprocess.run(command, capture_output=True, check=True)
        stats = json.loads(done.stdout)[0]["stats64"]
        return int(stats["rx"]["bytes"]), int(stats["tx"]["bytes"])

    def drop(self, node: int) -> None:
        """Lose every packet to and from the node, without a word to either side. What its queues hold still arrives."""
        commands = self.plan.drop(node)
        if node not in self._dropped:
            _run_all(commands)
            self._dropped.add(node)

    def restore(self, node: int) -> None:
        """Undo `drop`."""
        commands = self.plan.restore(node)
        if node in self._dropped:
            _run_all(commands)
            self._dropped.remove(node)

    def __enter__(self) -> Network:
        if self._plan is not None:
            raise ConfigError("a network is entered once at a time: make another Network for a second one")
        clean()
        netem = any(link.latency_ms for link in self._links) and _has_netem()
        self._plan = plan(self._links, f"{owner.tag()}-{next(_networks)}", netem)
        try:
            _run_all(self._plan.build)
            if self._plan.relay:
                self._relay = _start_relay(self._plan.relay)
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        relay = self._relay
        code = relay.poll() if relay else None
        words = relay.stderr.read() if relay and relay.stderr and code is not None else ""
        left = self._undo()
        if kind is None and code is not None:
            raise LaunchError(f"the relay of the emulated links ended early, exit code {code}: {words.strip()}")
        if kind is None and left:
            raise ConfigError(f"could not remove {', '.join(left)}: remove by hand with `ip netns delete`")

    def _undo(self) -> list[str]:
        """Remove everything; the names that are still there."""
        assert self._plan is not None
        left = _remove((*self._plan.namespaces, self._plan.hub), self._plan.undo)
        if self._relay:
            self._relay.kill()
            self._relay.communicate()
        self._plan = self._relay = None
        self._dropped.clear()
        return left


def probe() -> tuple[bool, str]:
    """Whether this machine can do namespaces with shaped links, by trying, and a sentence: what works or what to do."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return False, f"needs the program `{program}`: install iproute2, or {WAY_OUT}"
    if os.geteuid() != 0:
        return False, f"needs root: run with sudo, or {WAY_OUT}"

    def tried(name: str) -> tuple[bool, str]:
        tbf = _shape(name, "v0", 100.0, 0.0, 0.0)
        _run_all([("ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"), *tbf])
        if _fails(_netem_command(name)) is None:
            return True, "network namespaces, veth and tbf work; latency by netem"
        no_tun = _fails(("ip", "-n", name, "tuntap", "add", "tun0", "mode", "tun", "vnet_hdr"))
        if no_tun is None:
            return True, "network namespaces, veth and tbf work; latency by relay, as the kernel has no netem"
        return True, "network namespaces, veth and tbf work, but no latency: the kernel has no netem, and no tun either"

    try:
        return _trial(tried)
    except ConfigError as error:
        return False, str(error)


def clean() -> list[str]:
    """Remove the namespaces of launchers that are dead, with all that runs in them.

    Returns:
        The names removed. A name that is not ours, or whose launcher lives, is not touched.
    """
    found = sorted(RUN_DIR.iterdir()) if RUN_DIR.is_dir() else []
    dead = [path.name for path in found if owner.owner_alive(path.name) is False]
    left = _remove(dead, [("ip", "netns", "delete", name) for name in dead]) if dead else []
    if left:
        warnings.warn(f"could not remove {', '.join(left)}, left by a launcher that is dead: run as root to remove it")
    return [name for name in dead if name not in left]


def _has_netem() -> bool:
    return _trial(lambda name: _fails(_netem_command(name)) is None)


def _netem_command(name: str) -> Argv:
    return "tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"


def _trial(attempt: Callable[[str], T]) -> T:
    """What `attempt` returns for a namespace that exists only for it."""
    name = f"{owner.tag()}-{next(_networks)}-trial"
    try:
        _run_all([("ip", "netns", "add", name)])
        return attempt(name)
    finally:
        _remove([name], [("ip", "netns", "delete", name)])


def _run_all(commands: Iterable[Argv]) -> None:
    for command in commands:
        why = _fails(command)
        if why is not None:
            raise ConfigError(f"emulating links failed at `{shlex.join(command)}`: {why}. Needs root; or {WAY_OUT}")


def _fails(command: Argv) -> str | None:
    """Run a command; why it failed, or None if it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def _start_relay(command: Argv) -> subprocess.Popen[str]:
    relay = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACELINE_LAUNCHER": str(os.getpid())},
        start_new_session=True,  # an interrupt from the keyboard ends the workers first
    )
    assert relay.stdout is not None
    select.select([relay.stdout], [], [], 20)
    said = os.read(relay.stdout.fileno(), 64) if select.select([relay.stdout], [], [], 0)[0] else b""
    if said != b"ready\n":
        relay.kill()
        words = relay.communicate()[1].strip()
        raise ConfigError(
            f"emulating latency failed at `{shlex.join(command)}`: {words}. Set latency_ms to 0, or {WAY_OUT}"
        )
    return relay


def _remove(names: Sequence[str], commands: Iterable[Argv]) -> list[str]:
    """End what runs in these namespaces and run the commands that delete them; the names still there."""
    _end_inside(names)
    for command in commands:
        _fails(command)  # some may never have been made; those that stay are reported
    return [name for name in names if (RUN_DIR / name).exists()]


def _end_inside(names: Iterable[str]) -> None:
    """Kill the processes in these namespaces and wait until they are gone."""
    ours = {_identity(RUN_DIR / name) for name in names} - {None}
    for _ in range(ROUNDS if ours else 0):
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _inside(path, ours)]
        for pid in found:
            _end(pid, ours)
        if not found:
            return


def _end(pid: int, ours: set[tuple[int, int] | None]) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _inside(Path(f"/proc/{pid}"), ours):  # the descriptor is of the process that we mean: it cannot change now
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], 5)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def _inside(process: Path, ours: set[tuple[int, int] | None]) -> bool:
    return process.name != str(os.getpid()) and _identity(process / "ns/net") in ours


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
