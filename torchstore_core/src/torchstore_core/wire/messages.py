"""Every message of the control channel, as tagged msgspec Structs.

A connection starts with :class:`Hello`, which is answered by :class:`Welcome` (or
:class:`Failure`). A Hello without a session opens one: that connection is the session's *liveness
connection*, and the session lives exactly as long as it does. A Hello with a session's token adds a
*channel*, the connection of one event loop. Everything that a client holds (unfinished puts,
leases) belongs to the session, under ids that the client chooses, so that it can be given back over
any connection, in any order, even if the reply never arrived.

Requests carry an ``id``, which the reply repeats. :class:`Abort`, :class:`Release`, :class:`Cancel`
and :class:`Keep` have no reply. A reply with ``continued`` is a page of a long one, see
:mod:`.paging`.
"""

from __future__ import annotations

import msgspec

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine.topology import Topology
from torchstore_core.reports.repairs import RepairStatus as RepairStatus
from torchstore_core.reports.stat import Found as Found
from torchstore_core.reports.stat import Listed as Listed
from torchstore_core.reports.stat import Pending as Pending
from torchstore_core.reports.status import SessionStatus as SessionStatus
from torchstore_core.reports.status import SpillStatus as SpillStatus
from torchstore_core.reports.status import StatusReport as StatusReport
from torchstore_core.reports.status import VolumeStatus as VolumeStatus
from torchstore_core.values import TensorSlice, ValueMeta
from torchstore_core.wire.columns import EntryColumns as EntryColumns
from torchstore_core.wire.columns import ItemColumns as ItemColumns
from torchstore_core.wire.facts import Message as Message
from torchstore_core.wire.facts import VolumeInfo as VolumeInfo
from torchstore_core.wire.holds import Adopt as Adopt
from torchstore_core.wire.holds import Claim as Claim
from torchstore_core.wire.holds import Free as Free
from torchstore_core.wire.holds import Hold as Hold
from torchstore_core.wire.holds import Lend as Lend
from torchstore_core.wire.holds import LendAll as LendAll
from torchstore_core.wire.holds import Refs as Refs
from torchstore_core.wire.holds import RefsReply as RefsReply
from torchstore_core.wire.holds import TakeBack as TakeBack
from torchstore_core.wire.holds import Unhold as Unhold
from torchstore_core.wire.holds import WaitAny as WaitAny
from torchstore_core.wire.lines import ClientDied as ClientDied
from torchstore_core.wire.lines import RelayLost as RelayLost
from torchstore_core.wire.lines import Via as Via
from torchstore_core.wire.volumes.copies import CopierEnded as CopierEnded
from torchstore_core.wire.volumes.copies import Copies as Copies
from torchstore_core.wire.volumes.copies import Drain as Drain
from torchstore_core.wire.volumes.copies import DrainReply as DrainReply
from torchstore_core.wire.volumes.copies import Piece as Piece
from torchstore_core.wire.volumes.copies import StartCopier as StartCopier
from torchstore_core.wire.volumes.copies import TakeCopies as TakeCopies
from torchstore_core.wire.volumes.memory import Attach as Attach
from torchstore_core.wire.volumes.memory import Attached as Attached
from torchstore_core.wire.volumes.memory import Grown as Grown
from torchstore_core.wire.volumes.memory import Lost as Lost
from torchstore_core.wire.volumes.memory import MayGrow as MayGrow
from torchstore_core.wire.volumes.memory import PeerGone as PeerGone
from torchstore_core.wire.volumes.memory import PeerHandshake as PeerHandshake
from torchstore_core.wire.volumes.memory import PeerReply as PeerReply
from torchstore_core.wire.volumes.memory import Prefault as Prefault
from torchstore_core.wire.volumes.memory import ProcessDied as ProcessDied
from torchstore_core.wire.volumes.memory import Trim as Trim
from torchstore_core.wire.volumes.memory import Warm as Warm
from torchstore_core.wire.volumes.memory import Warmed as Warmed
from torchstore_core.wire.volumes.memory import WatchProcess as WatchProcess
from torchstore_core.wire.volumes.spilling import CutSpill as CutSpill
from torchstore_core.wire.volumes.spilling import Extent as Extent
from torchstore_core.wire.volumes.spilling import FreeSpill as FreeSpill
from torchstore_core.wire.volumes.spilling import HurrySpill as HurrySpill
from torchstore_core.wire.volumes.spilling import KeepSpill as KeepSpill
from torchstore_core.wire.volumes.spilling import Place as Place
from torchstore_core.wire.volumes.spilling import ReadPieces as ReadPieces
from torchstore_core.wire.volumes.spilling import ReadTogether as ReadTogether
from torchstore_core.wire.volumes.spilling import SpillDone as SpillDone
from torchstore_core.wire.volumes.spilling import SpillOrder as SpillOrder
from torchstore_core.wire.volumes.spilling import SpillPlace as SpillPlace
from torchstore_core.wire.volumes.spilling import SpillTrouble as SpillTrouble
from torchstore_core.wire.volumes.spilling import WriteTogether as WriteTogether
from torchstore_core.wire.volumes.spilling import WriteValues as WriteValues

PROTOCOL_VERSION = 19

#: Largest frame, in bytes. A longer reply is sent in pages (``wire.paging``); a longer request is
#: not possible. 18,000 entries of a state dict take about 2 MB.
MAX_FRAME = 64 << 20
#: Largest frame, in bytes, before a Hello has been accepted.
MAX_HELLO_FRAME = 64 << 10
#: Largest frame, in bytes, on a liveness connection that outlives the server: it stays in the
#: kernel's buffer until it is complete and was handled.
MAX_LIVENESS_FRAME = 64 << 10
#: Longest key, in characters.
MAX_KEY = 4096
#: Keys that begin with this belong to parts of the library. Only a prefix that begins with it, too,
#: lists them.
HIDDEN = ".torchstore-"
#: Most bytes of values that one message carries inline.
MAX_INLINE = 1 << 20
#: Most bytes in one handshake of a transport, and in its answer.
MAX_HANDSHAKE = 1 << 20
#: Seconds in which a volume answers one: a server half may start a process first.
HANDSHAKE_S = 60.0
#: Most characters of a server half's error message that are passed on.
MAX_REASON = 1 << 14
#: Most entries in one Listing, and most characters of their keys: limits a reply to a few MB.
MAX_LISTED = 10_000
MAX_LISTED_CHARS = 1 << 20
#: The role of a session that exists for holds alone, see ``SessionRecord.is_holder``.
HOLDER_ROLE = "references"
#: The role of the session of a copier, see :mod:`.copies`.
COPIER_ROLE = "copies"
#: Most unfinished versions in one StatusReply.
MAX_PENDING = 100
#: What is done with the values of a put when memory is full. 0 in a Put: as the store does by
#: default.
PINNED, SPILLABLE, EVICTABLE = 1, 2, 3


# ---- client to server ---------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message. ``session``: token to join, empty to open a session. ``returns``: this is the
    new liveness connection of a session that an earlier life of the server had; what follows it is
    a :class:`Resume`. ``life``: the only life of the server that may accept it, because whoever
    waits for the answer has to hear of the next one first; 0: any.
    """

    id: int
    protocol: int
    session: bytes
    topology: Topology
    facts: ClientFacts
    returns: bool = False
    life: int = 0


class Resume(Message, frozen=True, tag="resume"):
    """What the client of a session has that has come back: ids of unfinished puts, and leases, each
    with the positions that it holds (None: all). The rest is given up. No reply. It is told in as
    many messages as it takes, and counts with the ``last`` of them.

    ``life``: of the server that it answers. A later one, which only reads it because the one before
    has died, waits for the answer to its own question: what the client has begun since is not in
    this one. ``asks``: the numbers (``wire.repeating``) of requests that it may still send again.
    """

    life: int
    txns: list[int]
    leases: list[tuple[int, list[int] | None]]
    asks: list[int]
    last: bool = False


class PutItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value of a put, with its bytes inline as ``data`` or else with a place to be granted.

    ``part``: the value is this shard of the tensor that ``meta`` describes; several items of a put
    may be shards of the same key. In a put of a state dict, ``key`` is the entry's name, ``path``
    its place in the nested dict (encoded by the client; empty: the name itself), and ``same_as``
    the index of an earlier item with which it shares its bytes (tied weights), or -1.
    """

    key: str
    meta: ValueMeta
    nbytes: int
    data: bytes | None = None
    part: TensorSlice | None = None
    path: bytes = b""
    same_as: int = -1


class Publication(msgspec.Struct, frozen=True, array_like=True):
    """Makes the items of a put the entries of the state dict ``key``.

    Args:
        participant: the name of the participant that makes this put.
        participants: how many participants make a version.
        partial: whether entries that no participant puts are taken from the previous version.
        keep: how many versions stay readable; 0: unchanged.
        packed: whether a get of the key returns the state dict packed.
    """

    key: str
    participant: str
    participants: int
    partial: bool = False
    keep: int = 0
    packed: bool = False


#: The references that are in items of a put: the index of an item, and the tickets that they are
#: lent to. These are in flight as long as the value is there, complete or not; nothing else ends
#: them.
Lent = list[tuple[int, list[int]]]


class Put(Message, frozen=True, tag="put"):
    """Begin a put. Reply :class:`Granted`; if all items are inline, the put is committed at once,
    and the reply is :class:`Committed`.

    ``version``: the version to put, for every key; 0: the next one. ``when_full``: what is done
    with the values when memory is full: PINNED, SPILLABLE, EVICTABLE, or 0. ``columns``: the items,
    if they are many whole tensors; ``items`` is then empty. ``lent``: see :data:`Lent`.
    """

    id: int
    txn: int
    items: list[PutItem]
    version: int = 0
    group: Publication | None = None
    when_full: int = 0
    columns: ItemColumns | None = None
    lent: Lent = []


class Rewind(Put, frozen=True, tag="rewind"):
    """A put that goes back to ``version``: when that is whole, all that was as new or newer of
    these keys is gone.
    """


class PutObject(Message, frozen=True, tag="put-object"):
    """Begin to put a value without a key, which the session holds as ``hold`` from its commit on;
    see :mod:`.holds`. Replies as to a :class:`Put` of one item; the version is the object's number.
    ``when_full``, ``lent``: as for a :class:`Put`; what is held is not evicted.
    """

    id: int
    txn: int
    item: PutItem
    hold: int
    where: str = ""
    when_full: int = 0
    lent: Lent = []


class Commit(Message, frozen=True, tag="commit"):
    """Switch all keys of a put to their new versions in one step. Reply :class:`Committed`."""

    id: int
    txn: int


class Seal(Message, frozen=True, tag="seal"):
    """Commit a put whose only value was made in its memory, under a name that is known only now.
    Reply :class:`Committed`. The session leases the value from then on, so that its client can keep
    what it has mapped of it.

    ``key``: its name; empty: it is an object without a key, see :class:`PutObject`, as which it has
    ``hold`` and ``where``. ``lease``: the id of the lease. ``when_full``: as for a :class:`Put`.
    """

    id: int
    txn: int
    key: str
    lease: int
    hold: int = 0
    where: str = ""
    when_full: int = 0


class Abort(Message, frozen=True, tag="abort"):
    """Give up puts. The client has stopped writing to their memory, which can be reused. However,
    writes to the volumes in ``unsettled``, by the transports named there, may still arrive: the
    memory is reused only when these transports have ended them, as for a :class:`Settle`.
    """

    txns: list[int]
    unsettled: list[tuple[int, str]] = []


#: Offset and shape of a piece of a tensor, in elements.
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Want(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value that a get requests: a key, a version (0: the newest), and a box (None: all)."""

    key: str
    version: int = 0
    box: Box | None = None


class Locate(Message, frozen=True, tag="locate"):
    """Find values and lease them under ``lease``: all or none, from one consistent snapshot. Reply
    :class:`Located`.

    If the values have at most ``inline_max`` bytes in total, the reply contains them, and there is
    no lease. Otherwise it says where they are, but may contain those that were put inline.
    ``avoid``: volumes that the client cannot reach, so that copies elsewhere are
    preferred.
    """

    id: int
    lease: int
    wants: list[Want]
    inline_max: int
    avoid: list[int] = []


class LocateRefs(Locate, frozen=True, tag="locate-refs"):
    """A Locate of the versions that refs name. ``timelines``: one for each want; -1: any."""

    timelines: list[int] = []


class LocateKeys(Locate, frozen=True, tag="locate-keys"):
    """A Locate of the newest versions of ``keys``, whole; ``wants`` is empty."""

    keys: list[str] = []


class Fetch(Message, frozen=True, tag="fetch"):
    """Find a state dict, and lease entries of it under ``lease``. Reply :class:`Fetched`.

    ``version`` 0: the newest. ``wants``: the names of entries, with their boxes (their versions are
    ignored); None: all entries, whole. A name that does not exist is reported and is no error.
    ``inline_max``, ``avoid``: see :class:`Locate`.
    """

    id: int
    lease: int
    key: str
    version: int
    wants: list[Want] | None
    inline_max: int
    avoid: list[int] = []


class FetchRef(Fetch, frozen=True, tag="fetch-ref"):
    """A Fetch of exactly the version that a ref names."""

    timeline: int = 0


class FetchKeys(Fetch, frozen=True, tag="fetch-keys"):
    """A Fetch of the entries ``keys``, whole; ``wants`` is empty."""

    keys: list[str] = []


class Release(Message, frozen=True, tag="release"):
    """Release leases, or (``parts``) only some of the values of a lease. No reply.

    The values of a lease are numbered in the order of the reply's entries. An entry that is a
    single value counts as one, an entry in shards as one for each of its parts.
    """

    leases: list[int]
    parts: list[tuple[int, list[int]]] = []


class Keep(Message, frozen=True, tag="keep"):
    """Announce that this process page-locks memory of volumes. No reply; before it page-locks any,
    the client waits for the reply to a later request. None of it may be returned to the system
    while the session lives, or the device would keep using the old pages.
    """


class Delete(Message, frozen=True, tag="delete"):
    """Delete keys; ``strict``: all must exist, else nothing is deleted. Reply :class:`Deleted`.

    ``txn``: a number that no other put or deletion of the session has.
    """

    id: int
    keys: list[str]
    strict: bool
    txn: int = 0


class Exists(Message, frozen=True, tag="exists"):
    """Ask whether keys exist. Reply :class:`Flags`, one per key. Without keys, the reply only shows
    that all earlier requests of the connection have been handled.
    """

    id: int
    keys: list[str]


class Keys(Message, frozen=True, tag="keys"):
    """Ask for the keys that start with ``prefix``, sorted. Reply :class:`KeyList`."""

    id: int
    prefix: str


class Wait(Message, frozen=True, tag="wait"):
    """Wait until every key exists with at least ``min_version``. Reply :class:`Committed`."""

    id: int
    keys: list[str]
    min_version: int


class WaitAfter(Wait, frozen=True, tag="wait-after"):
    """A Wait for what follows the version ``min_version - 1`` of one key, as a ref names it.
    A Failure once that is no longer in the history of the key, because it was rewound.
    """

    timeline: int = 0


class Cancel(Message, frozen=True, tag="cancel"):
    """Cancel the Wait with this id, or drop the rest of a long reply. No reply."""

    request: int


class Unmet(Message, frozen=True, tag="unmet"):
    """Ask which of these keys a Wait would wait for now. Reply :class:`UnmetKeys`, at once."""

    id: int
    keys: list[str]
    min_version: int


class Versions(Message, frozen=True, tag="versions"):
    """Ask for the readable versions of a key, ascending. Reply :class:`Committed`."""

    id: int
    key: str


class Stat(Message, frozen=True, tag="stat"):
    """Ask what is known about a version of a key; 0: the newest. Reply :class:`StatReply`."""

    id: int
    key: str
    version: int = 0


class List(Message, frozen=True, tag="list"):
    """Ask for a page of what is known about the keys that start with ``prefix``. Reply
    :class:`Listing`.

    ``after``: the last key of the previous page; empty for the first page. Each page is a
    consistent snapshot, but different pages may show different states.
    """

    id: int
    prefix: str
    after: str = ""


class Status(Message, frozen=True, tag="status"):
    """Ask for the status of the store. Reply :class:`StatusReply`."""

    id: int


class Handshake(Message, frozen=True, tag="handshake"):
    """Send a request to the server half of a volume's transport. Reply :class:`Handshaken`.

    If ``transport`` is empty, the volume itself replies, with its ``plugins.surroundings``.
    """

    id: int
    volume: int
    transport: str
    data: bytes


class Settle(Message, frozen=True, tag="settle"):
    """Make the server half of a volume's transport end everything under way for this session,
    because the outcome of a write is uncertain. Reply :class:`Done`. Puts that are aborted in the
    meantime keep their memory until then.

    ``transport``: the transport's name; if empty or unknown to the volume, all halves are meant.
    """

    id: int
    volume: int
    transport: str = ""


Repeatable = (
    Put
    | Rewind
    | PutObject
    | Hold
    | Free
    | WaitAny
    | Refs
    | Commit
    | Seal
    | Locate
    | LocateRefs
    | LocateKeys
    | Fetch
    | FetchRef
    | FetchKeys
    | Delete
    | Exists
    | Keys
    | Wait
    | WaitAfter
    | Unmet
    | Versions
    | Stat
    | List
    | Status
    | Drain
    | Handshake
    | Settle
)


class Again(Message, frozen=True, tag="again"):
    """A request that was sent to an earlier life of the server, and to which no reply has come. It
    is answered as it was then, or executed now if it was not then. ``id`` is the request's.
    """

    id: int
    request: Repeatable


class Shutdown(Message, frozen=True, tag="shutdown"):
    """End the server. Reply :class:`Done`; then every connection closes. A member (see
    ``server.serving.members``) only leaves; the reply is then one :class:`Flags` value, which says
    whether the server ends with it.
    """

    id: int


Request = (
    Hello
    | Resume
    | Again
    | Repeatable
    | Unhold
    | TakeBack
    | Lend
    | LendAll
    | Adopt
    | Claim
    | Abort
    | Release
    | Keep
    | Cancel
    | Attach
    | Warm
    | Grown
    | SpillDone
    | ProcessDied
    | PeerReply
    | CopierEnded
    | TakeCopies
    | Shutdown
    | Via
    | ClientDied
    | RelayLost
)

# ---- server to client ---------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """Accepts a Hello, and describes the store. ``session``: the token for further channels.

    ``warm``: see :class:`Warmed`. ``transport``: see ``contracts.strategy.Strategy``. ``via``: the
    topology of the relay that carries the connection; None: there is no relay. ``owner``: the pid
    of the process with which the store ends; 0: none. ``incarnation``: of the store's memory;
    see ``ServerOptions``. ``life``: which one of the server's lives this is, from 1; 0:
    it does not come back when it dies. On a liveness connection, a Welcome that nothing has asked
    for says that the server has come back; the client answers with a :class:`Resume`.
    """

    id: int
    protocol: int
    session: bytes
    store_name: str
    server: Topology
    volumes: list[VolumeInfo]
    warm: list[tuple[int, int, int]]
    transport: str | tuple[str, ...] | None = None
    via: Topology | None = None
    owner: int = 0
    life: int = 0
    incarnation: int = 0


class Grant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of a value's bytes: volume (index), segment, and offset in bytes."""

    volume: int
    segment: int
    offset: int


class Granted(Message, frozen=True, tag="granted"):
    """The places to write to: one for each item that has no inline data and is not ``same_as``
    another, in order. None: nothing needs to be written, because another participant stores the
    same bytes.

    If values have copies, a list of the same length follows for each further copy, with None for
    values that have no such copy. If the items came in columns and there is only one grant, it is
    the place of the first, and the others follow it, see ``columns.in_a_row``.
    """

    id: int
    grants: list[Grant | None]
    continued: bool = False


class Committed(Message, frozen=True, tag="committed"):
    """The versions, one for each item of the put or key of the wait, in order; a put of a state
    dict has one version in all.
    """

    id: int
    versions: list[int]


class CommittedIn(Committed, frozen=True, tag="committed-in"):
    """A Committed, and the timeline of each of its versions. Sent once a key was rewound."""

    timelines: list[int] = []


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored shard: its box in the tensor, and inline ``data`` or a ``grant`` to read it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    data: bytes | None
    grant: Grant | None


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One located value: its inline ``data``, or a ``grant`` to read it under the lease.

    ``parts``: the value is stored as shards, and these shards overlap the requested box. A state
    dict has none of the three: see :class:`Fetch`. ``nbytes`` is the size of the whole value.
    ``resumed``: in a page, this entry continues the ``parts`` of the previous page's last entry.
    """

    version: int
    meta: ValueMeta
    nbytes: int
    data: bytes | None = None
    grant: Grant | None = None
    parts: list[Part] | None = None
    resumed: bool = False


class Located(Message, frozen=True, tag="located"):
    """The entries, in the order of the wants. ``leased``: whether the values are leased.
    ``columns``: the entries, if the request was for keys and all of them fit; ``entries`` is then
    empty.
    """

    id: int
    entries: list[Entry]
    leased: bool
    continued: bool = False
    columns: EntryColumns | None = None


class Fetched(Message, frozen=True, tag="fetched"):
    """Entries of one version of a state dict, in the order of the wants.

    Args:
        entries: the entries; None for a want that the state dict does not have.
        names, paths: the names and paths of the entries, in order, if all entries were requested;
            otherwise the names (and no paths) of the entries that were not requested.
        same_as: pairs ``[i, j]``: entry ``i`` shares its bytes with the earlier entry ``j``.
        leased: whether the values are leased.
        timeline: that of the version.
        columns: see :class:`Located`; also if all entries were requested.
    """

    id: int
    version: int
    entries: list[Entry | None]
    names: list[str]
    paths: dict[int, bytes]
    same_as: list[tuple[int, int]]
    leased: bool
    continued: bool = False
    timeline: int = 0
    columns: EntryColumns | None = None


class Handshaken(Message, frozen=True, tag="handshaken"):
    """The answer of a server half to a :class:`Handshake`."""

    id: int
    data: bytes


class Deleted(Message, frozen=True, tag="deleted"):
    """The number of keys that were deleted."""

    id: int
    count: int


class Flags(Message, frozen=True, tag="flags"):
    """One boolean per key."""

    id: int
    flags: list[bool]


class KeyList(Message, frozen=True, tag="keylist"):
    """Sorted keys."""

    id: int
    keys: list[str]
    continued: bool = False


class StatReply(Message, frozen=True, tag="stat-reply"):
    """What is known about one key."""

    id: int
    found: Found


class Listing(Message, frozen=True, tag="listing"):
    """A page of keys, sorted. ``more``: there are further keys after the last one of this page.

    ``pending``: the unfinished versions in the same range of keys, by key. A key that has only
    unfinished versions has no entry in ``entries``.
    """

    id: int
    entries: list[Listed]
    more: bool
    pending: list[Pending] = []


class StatusReply(Message, frozen=True, tag="status-reply"):
    """The status of the store."""

    id: int
    status: StatusReport


class Done(Message, frozen=True, tag="done"):
    """Acknowledges a request that has no result."""

    id: int


class UnmetKey(msgspec.Struct, frozen=True, array_like=True):
    """A key that does not meet the condition of a Wait: its newest version (0: none), whether that
    version is lost, and its unfinished versions, in short.
    """

    key: str
    version: int
    lost: bool = False
    pending: list[Pending] = []


class UnmetKeys(Message, frozen=True, tag="unmet-keys"):
    """The first few keys that a Wait still waits for."""

    id: int
    keys: list[UnmetKey]


class Delayed(Message, frozen=True, tag="delayed"):
    """The reply will come later. ``why``: for an error, if it does not come in time."""

    id: int
    why: str


class Failure(Message, frozen=True, tag="failure"):
    """A typed error. If ``id`` is 0, it concerns the whole connection, which closes."""

    id: int
    code: str
    message: str
    key: str | None = None
    details: dict[str, object] = {}


Reply = (
    Welcome
    | Granted
    | Committed
    | CommittedIn
    | Located
    | Fetched
    | Handshaken
    | Deleted
    | Flags
    | KeyList
    | StatReply
    | UnmetKeys
    | Listing
    | StatusReply
    | RefsReply
    | Done
    | Attached
    | Warmed
    | Prefault
    | Trim
    | MayGrow
    | WriteValues
    | WriteTogether
    | ReadPieces
    | ReadTogether
    | CutSpill
    | FreeSpill
    | KeepSpill
    | HurrySpill
    | WatchProcess
    | PeerHandshake
    | PeerGone
    | StartCopier
    | Lost
    | Copies
    | DrainReply
    | Delayed
    | Failure
)
