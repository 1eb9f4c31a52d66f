"""Two hosts joined by a wire of this process's own: it delays packets, drops some, or all.

Each host is a network namespace with a TUN interface. A forked process holds the other end of both
and carries what comes out of one into the other. Where the kernel has netem, that would do the
same; not every kernel has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commgrid.testing import Ranks
from tests.engines.agents import Host, namespace, run_ip
from tests.waiting import stop

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DEVICE = "wire0"
_RETRIES = 6  # of a TCP packet, about 25 s
ADDRESSES = ("10.78.0.1", "10.78.0.2")


@dataclass(frozen=True)
class Wire:
    """What joins two hosts.

    Args:
        hosts: both.
        carrier: the process that carries packets.
    """

    hosts: tuple[Host, Host]
    carrier: int

    def cut(self) -> None:
        """From now on nothing arrives, and nobody is told."""
        stop(self.carrier)


@contextlib.contextmanager
def wire(delay: float = 0.0, loss: float = 0.0) -> Iterator[Wire]:
    """Two hosts on a wire of which nothing is left afterwards.

    Args:
        delay: seconds that a packet takes, each way.
        loss: the share of packets that never arrive.

    Raises:
        OSError: this machine does not let us; says why.
    """
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(namespace(f"wire{os.getpid()}{end}")) for end in "ab"]
        hosts = [
            Host(address, ("ip", "netns", "exec", name), (("GLOO_SOCKET_IFNAME", _DEVICE),))
            for name, address in zip(names, ADDRESSES, strict=True)
        ]
        ready, told = os.pipe()
        stack.callback(os.close, ready)
        carrier = Ranks(_carry, 1, hosts, delay, loss, told, backend=None, check=False).start()
        os.close(told)
        stack.callback(_end, carrier)
        if not os.read(ready, 1):
            raise OSError("/dev/net/tun gives no interface here")
        for mine, theirs in ((0, 1), (1, 0)):
            peer = ("peer", ADDRESSES[theirs], "dev", _DEVICE)
            run_ip("-n", names[mine], "address", "add", ADDRESSES[mine], *peer)
            run_ip("-n", names[mine], "link", "set", _DEVICE, "up")
        yield Wire((hosts[0], hosts[1]), carrier.pid(0))


def _end(carrier: Ranks) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(carrier.pid(0), signal.SIGKILL)
    carrier.close()


def _carry(hosts: list[Host], delay: float, loss: float, told: int) -> None:
    """The carrier's whole life; it ends with the process that has forked it."""
    parent = os.getppid()
    try:
        ends = [_open(host) for host in hosts]
    except OSError:
        return
    os.write(told, b"1")
    draw = random.Random(0)
    due: list[tuple[float, int, int, bytes]] = []  # when, number, to which end, the packet
    number = 0
    while os.getppid() == parent:
        patience = max(due[0][0] - time.monotonic(), 0.0) if due else 1.0
        for end in select.select(ends, [], [], patience)[0]:
            packet = os.read(end, 65536)
            if draw.random() >= loss:
                number += 1
                other = ends[1 - ends.index(end)]
                heapq.heappush(due, (time.monotonic() + delay, number, other, packet))
        while due and due[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(due)
            with contextlib.suppress(OSError):  # an interface that is not up yet
                os.write(end, packet)


def _open(host: Host) -> int:
    """The outer end of a new interface in a host."""
    host.move_here()
    # A cut-off agent of torchrun waits until TCP gives up: 15 minutes unless told otherwise.
    Path("/proc/sys/net/ipv4/tcp_retries2").write_text(f"{_RETRIES}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return end
