"""The address under which other nodes reach this one: that of the network which the job uses."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping

import psutil

from mpift.errors import ConfigError

LOOPBACK = "127.0.0.1"
_INCLUDED = "OMPI_MCA_btl_tcp_if_include"
# Documentation's own network (RFC 5737): no packet is sent by connecting a datagram socket.
_ELSEWHERE = ("198.51.100.1", 9)


def job_address(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The IPv4 address of the interface ``name``; without one, of the interface that MPI was told
    to use, else of the one that its connections use, else of the one that leads elsewhere.

    Raises ``ConfigError`` if there is no interface of that name.
    """
    if name:
        found = _address_of(name)
        if found is None:
            known = ", ".join(sorted(psutil.net_if_addrs()))
            raise ConfigError(
                f"network_interface = {name!r}: {socket.gethostname()} has no interface of that"
                f" name with an IPv4 address; it has {known}"
            )
        return found
    told = environment.get(_INCLUDED, "").split(",")[0]
    return _address_of(told) or _of_connections() or _towards_elsewhere() or LOOPBACK


def _address_of(name: str) -> str | None:
    addresses = psutil.net_if_addrs().get(name, ())
    return next((a.address for a in addresses if a.family == socket.AF_INET), None)


def _of_connections() -> str | None:
    """What most of this process's connections to other machines go through."""
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    locals_ = Counter(
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp4")
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.ip not in own
    )
    return max(locals_, key=lambda ip: locals_[ip]) if locals_ else None


def _towards_elsewhere() -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
    except OSError:
        up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
        found = (_address_of(name) for name in sorted(up))
        return next((a for a in found if a is not None and not a.startswith("127.")), None)
