"""Links from this process to volumes of stores; ``torchstore doctor --peer`` shows only these."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import msgspec

from torchstore_cli import reports
from torchstore_cli.connection import StoreConnection, open_store
from torchstore_cli.doctor.differences import differences
from torchstore_core.clients.session.handshake import ask_volume
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.errors import ConfigurationError, TransportError
from torchstore_core.machine import topology
from torchstore_core.machine.numa import Numa
from torchstore_core.plugins.ranking import Policy, Ranking
from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.surroundings import Surroundings, surroundings
from torchstore_core.wire import messages as m

__all__ = ["LARGE", "examine_peer", "host_report", "link_report", "link_to"]
__all__ += ["numa_notes"]

#: A number of bytes that is large for every transport.
LARGE = 1 << 30


async def examine_peer(address: str | None, timeout: float, peer: str) -> reports.PeerReport:
    """Describe both sides of the links from here to a store's volumes on one host.

    Args:
        address: the address of the store; None: the store that is running.
        peer: the host's name or id, or the id of a volume.

    Raises:
        ConfigurationError: the store has no volume there; the error names the hosts of its volumes.
        TorchStoreError: the store cannot be reached.
    """
    policy = Policy.unchecked()
    registry = Registry(block=policy.block)
    async with open_store(address, timeout) as store:
        welcome = store.welcome
        wanted = [
            info
            for info in welcome.volumes
            if peer in (info.topology.hostname, info.topology.host_id, info.id)
        ]
        if not wanted:
            hosts = sorted({info.topology.hostname for info in welcome.volumes})
            raise ConfigurationError(
                f"store {welcome.store_name!r} has no volume on {peer!r}; it has some on "
                f"{', '.join(hosts)}"
            )
        here = surroundings(registry)
        volumes = [await _peer_volume(store, info, registry, policy, here) for info in wanted]
    return reports.PeerReport(
        store.address,
        welcome.store_name,
        host_report(topology.probe(), here.numa),
        sorted(spec.name for spec in registry.transports()),
        here.versions,
        volumes,
    )


async def _peer_volume(
    store: StoreConnection,
    info: m.VolumeInfo,
    registry: Registry,
    policy: Policy,
    here: Surroundings,
) -> reports.PeerVolume:
    link = await link_to(store, info, registry, policy, every=True)
    try:
        answer = await ask_volume(store.channel, info.index, "", b"")
        there = msgspec.msgpack.decode(answer, type=Surroundings)
    except (TransportError, msgspec.DecodeError) as error:
        there, notes = Surroundings(), [f"the volume does not tell its versions: {error}"]
    else:
        notes = differences(here, there)
    notes += numa_notes("here", here.numa)
    notes += numa_notes("there", there.numa)
    return reports.PeerVolume(
        host_report(info.topology, there.numa), sorted(info.offers), there.versions, link, notes
    )


def numa_notes(where: str, numa: Numa) -> list[str]:
    """Return what a process should know about devices on other nodes than its own."""
    apart = [f"{name} is on node {node}" for name, node in numa.apart().items()]
    if not apart:
        return []
    nodes = ", ".join(map(str, numa.process))
    return [
        f"{where}, {', '.join(apart)}, and the process runs on {nodes}: its memory is farther from "
        "the device. No bid counts that, because all transports over a device reach the same "
        "memory; bind the process to the device's node (numactl, taskset)"
    ]


async def link_to(
    store: StoreConnection,
    info: m.VolumeInfo,
    registry: Registry,
    policy: Policy,
    *,
    every: bool = False,
) -> reports.LinkReport:
    """Return the link of a client to a volume. The best one has been connected.

    Args:
        every: connect all that can then tell more than their bids, too. The volume may have to
            start a process for each.
    """
    here, welcome = topology.probe(), store.welcome
    reached = welcome.via or welcome.server
    same_host = info.topology.host_id == reached.host_id == here.host_id
    word = policy.with_transport(welcome.transport)
    ask = functools.partial(ask_volume, store.channel, info.index)
    volume = VolumeLinks(info, here, same_host, registry, word, ask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the refusals contain the same information
        await volume.connect_best()
        for candidate in [c for c in volume.ranking.candidates if every and c.spec.tells_route]:
            try:
                await volume.connect(candidate)
            except TransportError as error:
                volume.failed(candidate, error)
    told = link_report(info.id, same_host, volume.ranking, volume.route)
    volume.close()
    return told


def link_report(
    volume: str, same_host: bool, ranking: Ranking, route: Callable[[str], str]
) -> reports.LinkReport:
    """``route``: over what a transport of that name moves bytes; empty if that is not known."""
    order = ranking.order(LARGE)
    bids = sorted(ranking.candidates, key=lambda c: (not c.preferred, c.cost_s(LARGE)))
    return reports.LinkReport(
        volume=volume,
        same_host=same_host,
        chosen=order[0].spec.name if order else None,
        inline_up_to=ranking.inline_max(),
        bids=[
            reports.BidLine(
                c.spec.name,
                c.bid.latency_s,
                c.bid.bytes_per_s,
                c.spec.max_bytes,
                c.preferred,
                c.bid.reason,
                route(c.spec.name),
            )
            for c in bids
        ],
        refusals=dict(sorted(ranking.refusals.items())),
    )


def host_report(where: topology.Topology, numa: Numa) -> reports.Host:
    return reports.Host(
        where.hostname,
        where.host_id,
        where.kernel,
        where.cpus,
        where.memory_bytes,
        where.cuda_devices,
        where.rdma_devices,
        [
            reports.Address(one.interface, one.address, one.prefix, one.mbits_per_s)
            for one in where.networks
        ],
        numa,
    )
