"""The one-sided transport of torchcomms, as this package uses it.

Two properties of the library decide how. Its calls hold the interpreter's lock until the bytes have
arrived, and none of them has a time-out. So only the server half calls ``read`` and ``write``, in a
process of its own that can be killed; the client registers its memory, and no call of its waits for
the peer. And it finds the network device by a GPU: memory of the host counts as that of ``cuda:0``.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import torch

from torchstore_core.errors import TransportError, TransportUnavailableError
from torchstore_torchcomms.rdma.plugin import MODULE
from torchstore_torchcomms.rdma.protocol import Region

__all__ = ["Registered", "Transport", "check_supported"]

_DEVICE = "cuda:0"
_SUCCESS = 0


def _library() -> Any:
    try:
        return importlib.import_module(MODULE)
    except (ImportError, OSError) as error:
        raise TransportUnavailableError(
            f"this torchcomms has no one-sided transport ({MODULE}): {error}"
        ) from error


def check_supported() -> None:
    """Raises TransportUnavailableError if the library cannot be used on this host, with a reason.
    It may take a second: the library opens a device.
    """
    if not _library().RdmaTransport.supported():
        raise TransportUnavailableError(
            "torchcomms' RdmaTransport.supported() is false here: it finds no RDMA device, or no "
            "driver for it"
        )


class Registered:
    """Memory of this process, registered until this object dies."""

    def __init__(self, address: int, nbytes: int) -> None:
        """Raises TransportError if it cannot be registered."""
        block = (ctypes.c_char * nbytes).from_address(address)
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        self.address = address
        self.nbytes = nbytes
        try:
            self._memory: Any = _library().RdmaMemory(tensor)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"{nbytes} bytes cannot be registered: {error}") from error

    def region(self) -> Region:
        """What the peer needs to reach it."""
        address, nbytes, key = self._memory.to_remote_buffer().__getstate__()
        return Region(address, nbytes, key)

    def source(self, offset: int, nbytes: int) -> Any:
        """A part of it, to be read from."""
        return self._memory.to_view(offset, nbytes)

    def target(self, offset: int, nbytes: int) -> Any:
        """A part of it, to be written to."""
        return self._memory.to_mutable_view(offset, nbytes)


class Transport:
    """One end of a connection. When this object dies, nothing moves over it any more."""

    def __init__(self) -> None:
        """Raises TransportError if the library fails."""
        try:
            self._transport: Any = _library().RdmaTransport(torch.device(_DEVICE))
            #: What the other end connects to.
            self.address = bytes(self._transport.bind())
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"RdmaTransport cannot begin: {error}") from error

    def connect(self, address: bytes) -> None:
        """Connect to the other end, which does the same.

        Raises:
            TransportError: the library fails.
        """
        try:
            code = self._transport.connect(address)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"RdmaTransport cannot connect: {error}") from error
        if code != _SUCCESS:
            raise TransportError(f"RdmaTransport.connect failed with code {code}")

    def move(
        self, own: Registered, at: int, region: Region, offset: int, nbytes: int, *, into: bool
    ) -> None:
        """Move bytes between memory of this end and a region of the other. Blocks the process.

        Args:
            into: from the region into this end's memory.

        Raises:
            TransportError: they have not arrived.
        """
        remote_buffer = _library().RdmaRemoteBuffer
        there = remote_buffer(region.address + offset, nbytes, region.key)
        try:
            if into:
                code = self._transport.read(own.target(at, nbytes), there)
            else:
                code = self._transport.write(own.source(at, nbytes), there)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"RdmaTransport failed: {error}") from error
        if code != _SUCCESS:
            raise TransportError(f"RdmaTransport failed with code {code}")
