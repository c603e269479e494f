"""The answers of the commands, as data. ``--json`` writes exactly these fields, so their names do
not change: they are the names of the Python API, and ``docs/json.md`` lists them.

Fields that end in ``_bytes`` (and ``nbytes``) are exact numbers of bytes, fields in ``_s`` seconds;
``created`` is in seconds since 1970.
"""

from __future__ import annotations

import msgspec

from torchstore_core.machine.numa import Numa
from torchstore_core.reports.refs import RefReport
from torchstore_core.reports.repairs import DrainReport
from torchstore_core.wire import messages as m

__all__ = [
    "BenchReport",
    "BidLine",
    "CopyEngine",
    "Creator",
    "DoctorReport",
    "Failed",
    "Floors",
    "Host",
    "KeyDetails",
    "KeyLine",
    "KeyReport",
    "Large",
    "Limits",
    "LinkReport",
    "PluginLine",
    "RefsReport",
    "Removed",
    "Report",
    "Serving",
    "ShardPlace",
    "Small",
    "StatusReport",
    "StoreLinks",
]


class Failed(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a failed command. ``error``: a code of ``torchstore_core.errors``, ``usage`` or
    ``aborted``.
    """

    error: str
    message: str
    key: str | None = None
    details: dict[str, object] = {}


class StatusReport(msgspec.Struct, frozen=True):
    """``torchstore status``: the address, and the fields of the result of ``ts.status()``.

    ``sessions`` omits the session of the command itself. ``plugin_errors`` are the errors of the
    server's plug-ins, and of the observers installed here, which clients load.
    """

    address: str
    store_name: str
    uptime_s: float
    strategy: str
    controller_pid: int
    volumes: list[m.VolumeStatus]
    sessions: list[m.SessionStatus]
    keys: int
    operations: dict[str, int]
    operations_per_s: float
    plugin_errors: dict[str, str]
    pending: list[m.Pending]
    pending_versions: int
    pending_bytes: int
    incarnation: int
    spill: m.SpillStatus
    repair: m.RepairStatus
    log_bytes: int
    keeper_pid: int


class RefsReport(msgspec.Struct, frozen=True):
    """``torchstore status --refs``: what ``ts.refs()`` returns, and the address."""

    address: str
    refs: list[RefReport]


class KeyLine(msgspec.Struct, frozen=True):
    """One key of ``torchstore ls``. Objects have a ``codec``, tensors a ``dtype`` and a ``shape``,
    state dicts a number of ``entries``.
    """

    key: str
    version: int
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    codec: str | None
    nbytes: int
    volume: str
    inline: bool
    leases: int
    created: float
    creator_pid: int
    entries: int | None = None
    lost: str = ""

    @classmethod
    def make(cls, found: m.Listed) -> KeyLine:
        """Convert an entry of the wire, where the fields have the same names."""
        return msgspec.convert(found, cls, from_attributes=True)


class KeyReport(msgspec.Struct, frozen=True):
    """``torchstore ls``: sorted by key. ``pending`` are versions that are not complete yet."""

    address: str
    prefix: str
    entries: list[KeyLine]
    pending: list[m.Pending]


class Creator(msgspec.Struct, frozen=True):
    """The process that put a version."""

    pid: int
    hostname: str
    rank: int | None


class ShardPlace(msgspec.Struct, frozen=True):
    """Where a shard lies in its tensor, and its shape."""

    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]


class KeyDetails(msgspec.Struct, frozen=True):
    """``torchstore stat``. ``segment`` and ``offset`` are None if the value is not one range of
    memory.

    ``parts`` is the number of shards of a tensor, ``copies`` the number of volumes that hold the
    value. ``versions`` can be read; ``pending`` ones wait for shards or participants. ``lost`` says
    why part of the value can no longer be read; ``spilled_bytes`` how much of it is only on disk;
    ``shards`` where the shards of a tensor lie in it.
    """

    key: str
    version: int
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    codec: str | None
    nbytes: int
    volume: str
    inline: bool
    segment: int | None
    offset: int | None
    leases: int
    created: float
    creator: Creator
    entries: int | None
    parts: int
    versions: list[int]
    pending: list[m.Pending]
    lost: str = ""
    copies: int = 1
    spilled_bytes: int = 0
    shards: list[ShardPlace] = []

    @classmethod
    def make(cls, found: m.Found) -> KeyDetails:
        """Convert a reply of the wire, where the fields have the same names."""
        details = msgspec.convert(found, cls, from_attributes=True)
        if found.segment >= 0:
            return details
        return msgspec.structs.replace(details, segment=None, offset=None)


class Removed(msgspec.Struct, frozen=True):
    """``torchstore rm``: how many keys were deleted, and the keys that were named or found."""

    address: str
    deleted: int
    keys: list[str]


class Drained(msgspec.Struct, frozen=True):
    """``torchstore drain``: the address, and the fields of the result of ``ts.drain()``; ``done``
    says whether the volume is empty.
    """

    address: str
    volume: str
    draining: bool
    done: bool
    nbytes: int
    leased_bytes: int
    unfinished_bytes: int
    stuck_values: int
    stuck_bytes: int
    why: str
    spilled_bytes: int
    text: str

    @classmethod
    def of(cls, address: str, report: DrainReport) -> Drained:
        """The report of a volume of the store at this address."""
        fields = msgspec.structs.asdict(report)
        return cls(address=address, done=report.done, text=str(report), **fields)


class Serving(msgspec.Struct, frozen=True):
    """``torchstore serve``, once clients can connect."""

    address: str
    pid: int
    store_name: str
    num_storage_volumes: int
    capacity_bytes: int
    strategy: str


# ---- doctor -------------------------------------------------------------------------------


class Address(msgspec.Struct, frozen=True):
    """An address at which other hosts may reach a host. ``mbits_per_s``: the rate of its interface;
    0 if the system does not know it.
    """

    interface: str
    address: str
    prefix: int
    mbits_per_s: int


class Host(msgspec.Struct, frozen=True):
    """See ``torchstore_core.machine.topology`` and ``machine.numa``."""

    hostname: str
    host_id: str
    kernel: str
    cpus: int
    memory_bytes: int
    cuda_devices: int
    rdma_devices: tuple[str, ...]
    addresses: list[Address]
    numa: Numa


class CopyEngine(msgspec.Struct, frozen=True):
    """``native``: whether the compiled copy module is available. ``threads`` is None if the
    environment variable that sets their number is invalid.
    """

    native: bool
    threads: int | None


class Limits(msgspec.Struct, frozen=True):
    """Limits of this process; None means unlimited (for ``max_mappings``: unknown)."""

    memlock_bytes: int | None
    open_files: int | None
    open_files_hard: int | None
    max_mappings: int | None
    dev_shm_bytes: int | None


class BidLine(msgspec.Struct, frozen=True):
    """What one transport bid for a link. ``route``: over what its library moves bytes, as a link
    said that was connected to ask; empty if the reason says all.
    """

    transport: str
    latency_s: float
    bytes_per_s: float
    max_bytes: int | None
    preferred: bool
    reason: str
    route: str = ""


class LinkReport(msgspec.Struct, frozen=True):
    """All bids and refusals for one volume; ``chosen`` moves large values.

    Values of up to ``inline_up_to`` bytes ride in the message; -1 means that none does.
    """

    volume: str
    same_host: bool
    chosen: str | None
    inline_up_to: int
    bids: list[BidLine]
    refusals: dict[str, str]


class StoreLinks(msgspec.Struct, frozen=True):
    """One running store and the links to its volumes, or the error with which connecting failed."""

    address: str
    store_name: str
    pid: int
    links: list[LinkReport]
    error: str | None = None


class PluginLine(msgspec.Struct, frozen=True):
    """One installed plug-in. ``state``: ``ok``, ``error`` or ``blocked``."""

    group: str
    name: str
    distribution: str
    state: str
    error: str | None = None


class DoctorReport(msgspec.Struct, frozen=True):
    """``torchstore doctor``. ``ok`` means that there are no ``problems``, which keep a store from
    working here; ``notes`` are worth knowing. ``link`` is the link that a client would have to a
    volume of another process on this host.
    """

    ok: bool
    problems: list[str]
    notes: list[str]
    versions: dict[str, str]
    environment: dict[str, str]
    host: Host
    copy: CopyEngine
    limits: Limits
    runtime_directory: str | None
    default_capacity_bytes: int
    link: LinkReport
    stores: list[StoreLinks]
    plugins: list[PluginLine]


class PeerVolume(msgspec.Struct, frozen=True):
    """A volume of another host as ``torchstore doctor --peer`` sees it: where it runs, which
    transports it offers, the versions there, and the link that a client would have from here.
    ``notes``: where versions differ in a way that matters, and what is far from its device.
    """

    host: Host
    offers: list[str]
    versions: dict[str, str]
    link: LinkReport
    notes: list[str]


class PeerReport(msgspec.Struct, frozen=True):
    """``torchstore doctor --peer HOST``: both sides of the links to the volumes of one host.

    ``installed``: the transports that are installed here, whether or not the other side has them.
    """

    address: str
    store_name: str
    host: Host
    installed: list[str]
    versions: dict[str, str]
    volumes: list[PeerVolume]


# ---- bench --------------------------------------------------------------------------------


class Floors(msgspec.Struct, frozen=True):
    """What the machine does without a store: copies of the large value, by one thread per CPU, into
    warm and into untouched memory; and the median time of a small message over a Unix socket from
    an asyncio loop to another process and back.
    """

    warm_copy_s: float
    cold_copy_s: float
    echo_s: float


class Small(msgspec.Struct, frozen=True):
    """Seconds that a put and a get of a small value take, in one process."""

    nbytes: int
    put_p50_s: float
    put_p99_s: float
    get_p50_s: float
    get_p99_s: float


class Large(msgspec.Struct, frozen=True):
    """Seconds for a large value that one process puts and another gets: the first put, and the best
    of several rounds for the others.
    """

    nbytes: int
    first_put_s: float
    put_s: float
    get_in_place_s: float
    get_zero_copy_s: float


class BenchReport(msgspec.Struct, frozen=True):
    """``torchstore bench``. ``address`` is None if the command started a store of its own.

    The ``ratios`` of large values compare rates with the warm copy (1 is as fast, more is better),
    those of small values compare times with the echo (less is better).
    """

    address: str | None
    verified: bool
    copy_threads: int
    floors: Floors
    small: Small
    large: Large
    ratios: dict[str, float]


class TransportLine(msgspec.Struct, frozen=True):
    """One transport to one volume: the median rates of an in-place get and of a put of a large
    value, and the latency of a get of a value that is just too large for a message. ``error``: why
    it was not measured; then the figures are 0.
    """

    transport: str
    volume: str
    put_bytes_per_s: float = 0.0
    get_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    error: str | None = None


class TransportsReport(msgspec.Struct, frozen=True):
    """``torchstore bench --transports``. ``saved``: the file that corrects later bids."""

    address: str | None
    nbytes: int
    lines: list[TransportLine]
    saved: str | None


Report = (
    StatusReport
    | RefsReport
    | KeyReport
    | KeyDetails
    | Removed
    | Drained
    | Serving
    | DoctorReport
    | PeerReport
    | BenchReport
    | TransportsReport
)
