"""What a store knows of itself, as values for users: what ``status`` returns. Torch-free.

They travel inside of the wire's messages.
"""

from __future__ import annotations

import msgspec

from torchstore_core.reports.stat import Pending
from torchstore_core.reports.summaries import MOST_SHOWN, count_text, pending_text, pretty
from torchstore_core.reports.units import human_bytes, human_duration

__all__ = ["SessionStatus", "StatusReport", "VolumeStatus"]


class VolumeStatus(msgspec.Struct, frozen=True):
    """Memory of one volume, bytes. ``warm``: pool memory that is already backed by pages.

    ``lost``: why the volume is gone for good; empty while it lives. Nothing of it is free then.
    """

    id: str
    pid: int
    host_id: str
    hostname: str
    capacity_bytes: int
    used_bytes: int
    leased_bytes: int
    unfinished_bytes: int
    free_bytes: int
    warm_bytes: int
    transports: list[str]
    lost: str = ""


class SessionStatus(msgspec.Struct, frozen=True):
    """One client process. ``role``: see ``ClientFacts``; "orphan": its relay is gone, and what is
    left is what the process may still read (``server.orphans``).
    """

    pid: int
    hostname: str
    rank: int | None
    lanes: int
    leases: int
    leased_bytes: int
    unfinished_puts: int
    unfinished_bytes: int
    age_s: float
    role: str = ""


class StatusReport(msgspec.Struct, frozen=True):
    """What a store knows of itself: what ``status`` returns; printed, some lines for people.

    ``operations`` counts by name since the start. ``pending``: the first versions that are not
    whole yet, of ``pending_versions``; what is done of all of them takes ``pending_bytes``.
    """

    store_name: str
    controller_pid: int
    uptime_s: float
    keys: int
    volumes: list[VolumeStatus]
    sessions: list[SessionStatus]
    operations: dict[str, int]
    operations_per_s: float
    strategy: str
    plugin_errors: dict[str, str]
    pending: list[Pending] = []
    pending_versions: int = 0
    pending_bytes: int = 0

    def __str__(self) -> str:
        """Memory, keys, volumes, and what is not as it should be."""
        living = [v for v in self.volumes if not v.lost]
        lines = [
            f"store {self.store_name!r}, up {human_duration(self.uptime_s)}, "
            f"controller pid {self.controller_pid}, strategy {self.strategy}",
            f"{count_text(self.keys, 'key')}, {count_text(len(self.sessions), 'session')}, "
            f"{sum(self.operations.values()):,} operations so far "
            f"({self.operations_per_s:,.1f}/s)",
        ]
        lines += [
            f"volume {v.id}: {human_bytes(v.used_bytes)} of {human_bytes(v.capacity_bytes)} used, "
            f"{human_bytes(v.leased_bytes)} leased, {human_bytes(v.unfinished_bytes)} being written"
            for v in living[:MOST_SHOWN]
        ]
        if len(living) > MOST_SHOWN:
            lines.append(f"and {count_text(len(living) - MOST_SHOWN, 'volume')} more")
        lines += [f"volume {v.id} is lost: {v.lost}" for v in self.volumes if v.lost]
        if self.pending_versions:
            lines.append(
                f"{count_text(self.pending_versions, 'unfinished version')}, "
                f"{human_bytes(self.pending_bytes)}"
            )
            lines += [
                f"  version {p.version} of {p.key!r}: {pending_text(p)}"
                for p in self.pending[:MOST_SHOWN]
            ]
        lines += [f"plug-in {name}: {error}" for name, error in self.plugin_errors.items()]
        return "\n".join(lines)

    _repr_pretty_ = pretty
