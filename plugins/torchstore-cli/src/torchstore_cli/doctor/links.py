"""Links from this process to volumes of stores; ``torchstore doctor --peer`` shows only these."""

from __future__ import annotations

import functools
import warnings

from torchstore_cli import reports
from torchstore_cli.connection import StoreConnection, open_store
from torchstore_core.clients.session.handshake import ask_volume, socket_path
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine import topology
from torchstore_core.plugins.ranking import Policy, Ranking
from torchstore_core.plugins.registry import Registry
from torchstore_core.wire import messages as m

__all__ = ["LARGE", "examine_peer", "host_report", "link_report", "ranking_to"]

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
        volumes = [
            reports.PeerVolume(
                host_report(info.topology),
                sorted(info.offers),
                link_report(info.id, *await ranking_to(store, info, registry, policy)),
            )
            for info in wanted
        ]
    return reports.PeerReport(
        store.address,
        welcome.store_name,
        host_report(topology.probe()),
        sorted(spec.name for spec in registry.transports()),
        volumes,
    )


async def ranking_to(
    store: StoreConnection, info: m.VolumeInfo, registry: Registry, policy: Policy
) -> tuple[bool, Ranking]:
    """Return whether a volume is on this host, and the ranking of a client's transports to it,
    after the best link has been connected.
    """
    here, welcome = topology.probe(), store.welcome
    reached = welcome.via or welcome.server
    same_host = info.topology.host_id == reached.host_id == here.host_id
    word = policy.with_transport(welcome.transport)
    ask = functools.partial(ask_volume, store.channel, info.index)
    control = socket_path(store.address)
    volume = VolumeLinks(info, here, same_host, registry, word, control, ask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the refusals contain the same information
        await volume.connect_best()
    volume.close()
    return same_host, volume.ranking


def link_report(volume: str, same_host: bool, ranking: Ranking) -> reports.LinkReport:
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
            )
            for c in bids
        ],
        refusals=dict(sorted(ranking.refusals.items())),
    )


def host_report(where: topology.Topology) -> reports.Host:
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
    )
