"""Decides which agents get the volumes, and at which addresses these are reached. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from itertools import zip_longest


def spread(hosts: Sequence[str], volumes: int) -> list[int]:
    """Return the index of the agent for each volume, given the agents' hosts.

    With as many volumes as agents, each agent gets one, in order. With fewer volumes, hosts take
    turns. With more, agents get several, in turns.
    >>> spread(["a", "a", "b", "b"], 2), spread(["a", "a", "b", "b"], 4), spread(["a"], 2)
    ([0, 2], [0, 1, 2, 3], [0, 0])
    """
    if volumes >= len(hosts):
        return [i % len(hosts) for i in range(volumes)]
    by_host: dict[str, list[int]] = {}
    for at, host in enumerate(hosts):
        by_host.setdefault(host, []).append(at)
    turns = [at for turn in zip_longest(*by_host.values()) for at in turn if at is not None]
    return turns[:volumes]


def told_addresses(channel: str) -> tuple[str, ...]:
    """Return the IP address of a channel of the engine; empty if it has none, but a name, say, or a
    Unix socket. Names are not looked up.

    >>> told_addresses("tcp:10.0.0.7:26600"), told_addresses("tls:[fd00::7]:443")
    (('10.0.0.7',), ('fd00::7',))
    >>> told_addresses("unix:@abc"), told_addresses("metatls:host7:443"), told_addresses("local:3")
    ((), (), ())
    """
    host = channel.partition(":")[2].rpartition(":")[0]
    try:
        return (str(ipaddress.ip_address(host.strip("[]"))),)
    except ValueError:
        return ()
