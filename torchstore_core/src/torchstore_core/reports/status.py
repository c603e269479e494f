"""What a store knows about itself: the result of ``status``. Torch-free.

The messages of the wire protocol carry these values.
"""

from __future__ import annotations

import msgspec

from torchstore_core.contracts.when_full import is_url
from torchstore_core.reports.repairs import RepairStatus
from torchstore_core.reports.stat import Pending
from torchstore_core.reports.summaries import MOST_SHOWN, count_text, pending_text, pretty
from torchstore_core.reports.units import human_bytes, human_duration


class VolumeStatus(msgspec.Struct, frozen=True):
    """The status of one volume and its memory.

    Args:
        used_bytes: the bytes in use, including leased and unfinished ones.
        leased_bytes: the bytes that readers lease.
        unfinished_bytes: the bytes that are being written.
        warm_bytes: the bytes of memory that are already backed by pages.
        transports: the names of the transports that serve the volume.
        lost: why the volume is permanently lost, in which case none of its memory is free; empty
            while it is live.
        draining: whether it is being drained, or was: no put goes to it.
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
    draining: bool = False


class SessionStatus(msgspec.Struct, frozen=True):
    """One client process and what it holds.

    Args:
        lanes: how many of its event loops are connected.
        age_s: the seconds since it connected.
        role: see ``ClientFacts``; or "orphan" if its relay is gone and only its leases are left, on
            values that the process may still read.
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


class SpillStatus(msgspec.Struct, frozen=True):
    """What has left memory because it was full, and where to.

    Args:
        directory: where values are spilled to, a directory or a URL without what is secret of it;
            empty if the store does not spill.
        capacity_bytes: the most bytes to spill.
        disk_bytes: bytes of the disk that are in use.
        spilled: how many values are only on disk now.
        spilled_bytes: how many bytes these have.
        clean_bytes: bytes of memory whose values are on disk, too, so that it is free at once.
        waiting: how many requests wait for room in memory.
        written_bytes, read_bytes: how much has been written to disk, and read back, so far.
        evicted, evicted_bytes: how many values have been evicted so far, and their bytes.
        trouble: why nothing could be written the last time; empty if it could.
        file_system: the type of the directory's file system, or the protocol of the URL; empty if
            it is not known.
        left_bytes: how many more bytes can be spilled, as far as is known: others may use the same
            disk.
    """

    directory: str = ""
    capacity_bytes: int = 0
    disk_bytes: int = 0
    spilled: int = 0
    spilled_bytes: int = 0
    clean_bytes: int = 0
    waiting: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    trouble: str = ""
    file_system: str = ""
    left_bytes: int = 0

    def __str__(self) -> str:
        """One line for people; empty if nothing is spilled or evicted."""
        parts: list[str] = []
        if self.directory:
            parts.append(
                f"{human_bytes(self.spilled_bytes)} in {count_text(self.spilled, 'value')} spilled "
                f"to {self.directory}, {human_bytes(self.disk_bytes)} of "
                f"{human_bytes(self.capacity_bytes)} {'' if is_url(self.directory) else 'on disk '}"
                "used"
            )
        if self.evicted:
            parts.append(
                f"{count_text(self.evicted, 'value')} evicted ({human_bytes(self.evicted_bytes)})"
            )
        if self.waiting:
            parts.append(f"{count_text(self.waiting, 'request')} waiting for room")
        if self.trouble:
            parts.append(f"cannot write: {self.trouble}")
        return "; ".join(parts)


class StatusReport(msgspec.Struct, frozen=True):
    """The status of a store; the result of ``status``. ``str()`` of it is a short summary.

    Args:
        incarnation: a random number that the store's memory was given when it began. A store that
            starts again without its memory has another one, and its versions start at 1 again.
        keys: the number of keys.
        uptime_s: since its server was started; one that came back begins anew.
        operations: the number of requests of each kind that this server has had.
        plugin_errors: why plug-ins do not work, by name.
        pending: the first unfinished versions.
        pending_versions: the number of all unfinished versions.
        pending_bytes: the committed bytes of all unfinished versions.
        spill: what has left memory because it was full.
        repair: values that lack copies, or are on a volume that is drained.
        keeper_pid: the keeper, which starts the server again if it dies; 0: there is none.
        log_bytes: the memory of the log of a store with a keeper, besides that of its volumes.
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
    incarnation: int = 0
    spill: SpillStatus = SpillStatus()
    repair: RepairStatus = RepairStatus()
    log_bytes: int = 0
    keeper_pid: int = 0

    def __str__(self) -> str:
        """Describe the store's keys, sessions and volumes, and any problems."""
        living = [v for v in self.volumes if not v.lost]
        lines = [
            f"store {self.store_name!r}, up {human_duration(self.uptime_s)}, "
            f"controller pid {self.controller_pid}, strategy {self.strategy}, "
            f"incarnation {self.incarnation}",
            f"{count_text(self.keys, 'key')}, {count_text(len(self.sessions), 'session')}, "
            f"{sum(self.operations.values()):,} operations so far "
            f"({self.operations_per_s:,.1f}/s)",
        ]
        lines += [
            f"volume {v.id}: {human_bytes(v.used_bytes)} of {human_bytes(v.capacity_bytes)} used, "
            f"{human_bytes(v.leased_bytes)} leased, {human_bytes(v.unfinished_bytes)} being written"
            + ("; drained" if v.draining else "")
            for v in living[:MOST_SHOWN]
        ]
        if len(living) > MOST_SHOWN:
            lines.append(f"and {count_text(len(living) - MOST_SHOWN, 'volume')} more")
        if spill := str(self.spill):
            lines.append(spill)
        if self.keeper_pid:
            lines.append(f"keeper pid {self.keeper_pid}, its log {human_bytes(self.log_bytes)}")
        else:
            lines.append("no keeper: all of this is lost if the server dies")
        if repair := str(self.repair):
            lines.append(f"repair: {repair}")
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
