"""Descriptor of the ``rdma`` transport."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import msgspec

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.rates import Rate, device_rate, network_rate
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec
from torchstore_core.machine.topology import probe

__all__ = ["LIBRARY", "Offer", "torchstore_transport", "version"]

#: The module of the library, and the distribution that it comes with.
LIBRARY = "nixl_cu12", "nixl-cu12"

# With devices: a share of their rate that ranks it before everything that goes through sockets.
# Without: one that ranks it last, because whatever the network is, plain sockets are faster on it.
_DEVICE_LATENCY_S, _DEVICE_SHARE = 300e-6, 0.97
_PLAIN_LATENCY_S, _PLAIN_SHARE, _PLAIN_BYTES_PER_S = 5e-3, 0.3, 0.1e9


# Transports of UCX that reach RDMA devices, by how their names begin.
_RDMA = ("all", "ib", "rc", "dc", "ud", "srd", "gga")


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What every client receives.

    It is here, because every process that opens a store loads this module, and only this one.

    Args:
        library: the version of NIXL, which must be the same.
        excluded: the setting that keeps UCX from using RDMA devices at the volume; empty if none.
    """

    library: str
    excluded: str = ""


@functools.cache
def version() -> str:
    """The version of the library, which is not loaded for this.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    # Not at the top: a server that does not come here saves 1.5 MB of modules.
    from importlib import metadata

    return metadata.version(LIBRARY[1])


def _probe() -> str | None:
    if find_spec(LIBRARY[0]) is None:
        return f"NIXL is not installed here: pip install {LIBRARY[1]}"
    return None


def excluded(rdma_devices: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the setting that keeps UCX from using these devices; empty if none does.

    >>> excluded(["mlx5_0"], {"UCX_TLS": "tcp,sm"})
    'UCX_TLS=tcp,sm'
    >>> excluded(["mlx5_0"], {"UCX_TLS": "^tcp", "UCX_NET_DEVICES": "mlx5_0:1"})
    ''
    """
    transports, devices = (environment.get(name, "") for name in ("UCX_TLS", "UCX_NET_DEVICES"))
    if not _is_usable(transports, lambda name: name.startswith(_RDMA), ("all", "ib")):
        return f"UCX_TLS={transports}"
    if not _is_usable(devices, lambda name: name.partition(":")[0] in rdma_devices, ("all",)):
        return f"UCX_NET_DEVICES={devices}"
    return ""


def _is_usable(setting: str, names_it: Callable[[str], bool], every: Sequence[str]) -> bool:
    """Whether a list of UCX, of what it may use or after a ``^`` may not, leaves any. ``every``:
    words that stand for all of them.
    """
    names = [name.strip() for name in setting.removeprefix("^").split(",") if name.strip()]
    if setting.startswith("^"):
        return not any(name in every for name in names)
    return not names or any(name in every or names_it(name) for name in names)


def _bid(context: LinkContext) -> Bid | Refusal:
    offer = Offer("")  # of a volume that only might be
    if context.offer:
        try:
            offer = msgspec.msgpack.decode(context.offer, type=Offer)
        except msgspec.DecodeError:
            return Refusal("the volume has another version of torchstore-rdma")
        if offer.library != version():
            return Refusal(f"the volume has NIXL {offer.library}, this process has {version()}")
    here, there = context.client.rdma_devices, context.volume.rdma_devices
    sides = ("this host", here, excluded(here)), ("the volume's host", there, offer.excluded)
    devices = device_rate(context)
    if devices is not None and not any(setting for _, _, setting in sides):
        # What UCX takes on one host is known when it has connected: see ``Link.route``.
        reason = "same host: UCX over shared memory or RDMA devices"
        return Bid(
            _DEVICE_LATENCY_S,
            devices.bytes_per_s * _DEVICE_SHARE,
            reason if context.same_host else devices.reason,
        )
    without = [
        f"{setting} on {whose}" if names else f"no RDMA device on {whose}"
        for whose, names, setting in sides
        if setting or not names
    ]
    rate, most = network_rate(context), _PLAIN_BYTES_PER_S
    if isinstance(rate, Rate):  # UCX may know a way where addresses tell nothing
        most = min(most, rate.bytes_per_s * _PLAIN_SHARE)
    return Bid(
        _PLAIN_LATENCY_S,
        most,
        f"{without[0]}: UCX over TCP or shared memory, slower than tcp and shm",
    )


def _offer() -> bytes:
    return msgspec.msgpack.encode(Offer(version(), excluded(probe().rdma_devices)))


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "rdma",
        bid=_bid,
        client="torchstore_rdma.link:RdmaLink",
        server="torchstore_rdma.server:RdmaServer",
        probe=_probe,
        isolated=True,
        offer=_offer,
        listens=True,
        tells_route=True,
        libraries=(LIBRARY[1],),
    )
