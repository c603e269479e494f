"""The base class of all messages, and the description of a volume that they carry.

:mod:`.messages` re-exports both.
"""

from __future__ import annotations

import msgspec

from torchstore_core.machine.topology import Topology


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of all messages."""


class VolumeInfo(msgspec.Struct, frozen=True, array_like=True):
    """One volume and the offers of its transports (name to opaque bytes).

    ``refused``: why transports that are installed there are not served (name to reason).
    ``lost``: why its memory is permanently lost; empty while the volume is live.
    """

    id: str
    index: int
    pid: int
    topology: Topology
    capacity_bytes: int
    offers: dict[str, bytes]
    lost: str = ""
    refused: dict[str, str] = {}
