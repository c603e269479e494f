"""The base of all messages, and how they describe volumes.

:mod:`.messages` names all of it, too.
"""

from __future__ import annotations

import msgspec

from torchstore_core.machine.topology import Topology

__all__ = ["Message", "VolumeInfo"]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


class VolumeInfo(msgspec.Struct, frozen=True, array_like=True):
    """One volume and what its transports offer (name to opaque bytes).

    ``lost``: why its memory is gone for good; empty while it lives.
    """

    id: str
    index: int
    pid: int
    topology: Topology
    capacity_bytes: int
    offers: dict[str, bytes]
    lost: str = ""
