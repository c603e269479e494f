"""Descriptor of the ``torchcomms-rdma`` transport."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.rates import device_rate
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec

__all__ = ["MODULE", "torchstore_transport"]

#: The module with the one-sided transport. Builds for CPUs do not have it.
MODULE = "torchcomms._transport"

# Estimates: what a message over the control connection takes, and the share of the devices' rate.
# NIXL's transport bids more, because it has been tested.
_LATENCY_S = 1e-3
_SHARE = 0.95


def _probe() -> str | None:
    """Do not import torchcomms: that imports torch, and a placeholder raises."""
    try:
        found = importlib.util.find_spec("torchcomms")
    except (ImportError, ValueError):
        found = None
    if found is None:
        return "torchcomms is not installed"
    name = MODULE.rpartition(".")[2]
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    endings = (*importlib.machinery.EXTENSION_SUFFIXES, *importlib.machinery.SOURCE_SUFFIXES)
    if not any((folder / f"{name}{ending}").exists() for folder in folders for ending in endings):
        # Not at the top: a server where torchcomms is not installed saves 1.5 MB of modules.
        from importlib import metadata

        try:
            version = metadata.version("torchcomms")
        except metadata.PackageNotFoundError:
            version = "(of an unknown version)"
        return f"torchcomms {version} was built without its one-sided transport ({MODULE})"
    return None


def _bid(context: LinkContext) -> Bid | Refusal:
    for whose, place in (("this host", context.client), ("the volume's host", context.volume)):
        if not place.rdma_devices:
            return Refusal(f"no RDMA device on {whose}")
        if not place.cuda_devices:
            return Refusal(f"no GPU on {whose}, by which torchcomms finds the RDMA device to use")
    devices = device_rate(context)
    if devices is None:
        return Refusal("no RDMA devices")
    return Bid(_LATENCY_S, devices.bytes_per_s * _SHARE, f"torchcomms: one-sided, {devices.reason}")


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return TransportSpec(
        "torchcomms-rdma",
        bid=_bid,
        client="torchstore_torchcomms.rdma.link:RdmaLink",
        server="torchstore_torchcomms.rdma.server:RdmaServer",
        probe=_probe,
        isolated=True,
        listens=True,
        libraries=("torchcomms",),
    )
