"""Where other hosts reach this one, and a socket there: for what ranks say beside torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from commgrid.errors import CommGridError

_DATAGRAM = socket.SOCK_DGRAM


def own_host() -> str:
    """Return the name of this process's host: COMMGRID_HOST, or the machine's own."""
    return os.environ.get("COMMGRID_HOST") or socket.gethostname()


def ranks_here(rank: int) -> range:
    """Return the ranks on this host, as torchrun's variables tell; empty if they do not.

    torchrun numbers the ranks of one host one after the other.

    Args:
        rank: this process's.
    """
    local = os.environ.get("LOCAL_RANK", "")
    if not local.isdecimal():
        return range(0)
    first = rank - int(local)
    return range(first, first + ranks_of_a_host())


def ranks_of_a_host() -> int:
    """Return how many ranks each host has, as torchrun's variable tells; 0: it does not."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() else 0


def outward_address() -> str:
    """Return this host's address for others, if the store does not tell.

    A host's own name may mean a loopback address, such as Debian's 127.0.1.1, on each host its own.
    """
    with suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127."):
            return found
    return address_towards("192.0.2.1", 9) or "127.0.0.1"  # by the default route; nothing is sent


def address_towards(host: str, port: int) -> str | None:
    """This host's address on the way to another; None: there is no way.

    Args:
        host, port: where all ranks can go, as to the store. Nothing is sent there.

    Example:
        >>> address_towards("127.0.0.1", 9)
        '127.0.0.1'
    """
    with suppress(OSError):
        for kind, *_, where in socket.getaddrinfo(host, port, type=_DATAGRAM):
            with suppress(OSError), socket.socket(kind, _DATAGRAM) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return None


def listening(address: str, without: str) -> socket.socket:
    """A socket that other ranks connect to, on a port that the kernel chooses.

    Args:
        address: of this host, IPv4 or IPv6.
        without: what does without it, for the error.

    Raises:
        CommGridError: none can be opened there.
    """
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=kind, backlog=256)
    except OSError as error:
        raise CommGridError(
            f"no socket that other ranks connect to can be opened on {address}, from where this "
            f"host reaches the store: {error.strerror or error}; {without} does without"
        ) from error
