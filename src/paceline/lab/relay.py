"""Latency for kernels without netem: a process that holds every packet for a while.

relay.py TUN ADDRESS=MILLISECONDS...

The hub of an emulated network routes packets into the device TUN; this process reads them, keeps each until the latencies
of its source and its destination have passed, and writes it back, whence it is routed to its node. Segments stay joined on
the way (a virtio header says how to cut them), so a packet costs two system calls per 64 kB and not per 1500 bytes.

Runs from the file alone: the standard library is all it needs. It says `ready` once packets flow.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping

SET_DEATH_SIGNAL = 1
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
HEADER_BYTES = 10  # struct virtio_net_hdr
PACKET_BYTES = HEADER_BYTES + 65536
BATCH = 64  # packets read before those due are written


def open_tun(name: str) -> int:
    """A descriptor that reads and writes the device's packets, segments joined, without blocking."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return tun


def delays_s(latency_ms: Mapping[str, float]) -> dict[bytes, float]:
    """How long to hold a packet, by its source and destination as they stand in the header.

    >>> delays_s({"10.0.0.1": 5, "10.0.0.2": 20})[bytes([10, 0, 0, 1, 10, 0, 0, 2])]
    0.025
    """
    packed = {socket.inet_aton(address): value for address, value in latency_ms.items()}
    return {a + b: (packed[a] + packed[b]) / 1000 for a in packed for b in packed}


def relay(tun: int, delay_s: Mapping[bytes, float]) -> None:
    """Pass packets on for ever, each when its time has come; in order between any two nodes."""
    held: list[tuple[float, int, bytes]] = []
    addresses = slice(HEADER_BYTES + 12, HEADER_BYTES + 20)
    count = 0
    clock, read, write, push, pop = time.monotonic, os.read, os.write, heapq.heappush, heapq.heappop
    while True:
        select.select([tun], [], [], max(0.0, held[0][0] - clock()) if held else None)
        try:
            for _ in range(BATCH):
                packet = read(tun, PACKET_BYTES)
                count += 1
                push(held, (clock() + delay_s.get(packet[addresses], 0.0), count, packet))
        except BlockingIOError:
            pass
        now = clock()
        while held and held[0][0] <= now:
            try:
                write(tun, pop(held)[2])
            except OSError:  # a packet the kernel does not take is a packet lost, as on any link
                pass


def main() -> None:
    """Relay the packets of the device named on the command line until the launcher dies."""
    name, *latencies = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(os.environ["PACELINE_LAUNCHER"]):  # it died before we asked
        sys.exit(1)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # workers that fill every core must not stretch the latency
    except PermissionError:
        pass
    pairs = (one.split("=") for one in latencies)
    delay_s = delays_s({address: float(value) for address, value in pairs})
    tun = open_tun(name)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(tun, delay_s)


if __name__ == "__main__":
    main()
