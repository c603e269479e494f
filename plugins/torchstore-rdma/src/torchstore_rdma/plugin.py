"""Descriptor of the ``rdma`` transport."""

from __future__ import annotations

import functools
from importlib import metadata
from importlib.util import find_spec

import msgspec

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.rates import Rate, device_rate, network_rate
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

__all__ = ["LIBRARY", "Offer", "torchstore_transport", "version"]

#: The module of the library, and the distribution that it comes with.
LIBRARY = "nixl_cu12", "nixl-cu12"

# With devices: a share of their rate that ranks it before everything that goes through sockets.
# Without: one that ranks it last, because whatever the network is, plain sockets are faster on it.
_DEVICE_LATENCY_S, _DEVICE_SHARE = 300e-6, 0.97
_PLAIN_LATENCY_S, _PLAIN_SHARE, _PLAIN_BYTES_PER_S = 5e-3, 0.3, 0.1e9


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What every client receives. ``library``: the version of NIXL, which must be the same.

    It is here, because every process that opens a store loads this module, and only this one.
    """

    library: str


@functools.cache
def version() -> str:
    """The version of the library, which is not loaded for this.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return metadata.version(LIBRARY[1])


def _probe() -> str | None:
    if find_spec(LIBRARY[0]) is None:
        return f"NIXL is not installed here: pip install {LIBRARY[1]}"
    return None


def _bid(context: LinkContext) -> Bid | Refusal:
    if context.offer:  # otherwise it is a volume that only might be
        try:
            offer = msgspec.msgpack.decode(context.offer, type=Offer)
        except msgspec.DecodeError:
            return Refusal("the volume has another version of torchstore-rdma")
        if offer.library != version():
            return Refusal(f"the volume has NIXL {offer.library}, this process has {version()}")
    if (devices := device_rate(context)) is not None:
        return Bid(_DEVICE_LATENCY_S, devices.bytes_per_s * _DEVICE_SHARE, devices.reason)
    without = [
        whose
        for whose, place in (("this host", context.client), ("the volume's host", context.volume))
        if not place.rdma_devices
    ]
    rate, most = network_rate(context), _PLAIN_BYTES_PER_S
    if isinstance(rate, Rate):  # UCX may know a way where addresses tell nothing
        most = min(most, rate.bytes_per_s * _PLAIN_SHARE)
    return Bid(
        _PLAIN_LATENCY_S,
        most,
        f"no RDMA device on {without[0]}: UCX over TCP or shared memory, slower than tcp and shm",
    )


def _offer() -> bytes:
    return msgspec.msgpack.encode(Offer(version()))


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
    )
