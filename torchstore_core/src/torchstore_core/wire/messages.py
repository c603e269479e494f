"""Every message of the control channel, as tagged msgspec Structs.

A connection starts with :class:`Hello` and is answered :class:`Welcome` (or :class:`Failure`).
A Hello without a session opens one: that connection is its *liveness connection*, and the session
lives exactly as long as it. A Hello with a session's token adds a *channel*: a pipe of one event
loop. Everything a client holds (unfinished puts, leases) belongs to the session, under ids the
client chooses, so that it can be given back from any channel, in any order, also when the reply
never arrived.

Requests carry ``id``; the reply repeats it. :class:`Abort`, :class:`Release` and :class:`Cancel`
have no reply. A reply with ``continued`` is a page of a long one, see :mod:`.paging`.
"""

from __future__ import annotations

import msgspec

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine.topology import Topology
from torchstore_core.reports.stat import Found as Found
from torchstore_core.reports.stat import Listed as Listed
from torchstore_core.reports.stat import Pending as Pending
from torchstore_core.reports.status import SessionStatus as SessionStatus
from torchstore_core.reports.status import SpillStatus as SpillStatus
from torchstore_core.reports.status import StatusReport as StatusReport
from torchstore_core.reports.status import VolumeStatus as VolumeStatus
from torchstore_core.values import TensorSlice, ValueMeta
from torchstore_core.wire.facts import Message as Message
from torchstore_core.wire.facts import VolumeInfo as VolumeInfo
from torchstore_core.wire.memory import Attach as Attach
from torchstore_core.wire.memory import Lost as Lost
from torchstore_core.wire.memory import PeerGone as PeerGone
from torchstore_core.wire.memory import PeerHandshake as PeerHandshake
from torchstore_core.wire.memory import PeerReply as PeerReply
from torchstore_core.wire.memory import Prefault as Prefault
from torchstore_core.wire.memory import ProcessDied as ProcessDied
from torchstore_core.wire.memory import Trim as Trim
from torchstore_core.wire.memory import Warm as Warm
from torchstore_core.wire.memory import Warmed as Warmed
from torchstore_core.wire.memory import WatchProcess as WatchProcess

PROTOCOL_VERSION = 9

#: Largest frame, in bytes. A longer reply comes in pages (``wire.paging``); a request cannot be
#: longer. 18,000 entries of a state dict need about 2 MB.
MAX_FRAME = 64 << 20
#: Largest frame before a Hello was accepted.
MAX_HELLO_FRAME = 64 << 10
#: Longest key, in characters.
MAX_KEY = 4096
#: Most bytes of values that one message carries inline.
MAX_INLINE = 1 << 20
#: Most bytes of one handshake of a transport, and of its answer.
MAX_HANDSHAKE = 1 << 20
#: Characters of a server half's error that are passed on.
MAX_REASON = 1 << 14
#: Most entries of one Listing, and most characters of keys in it: keeps the reply at a few MB.
MAX_LISTED = 10_000
MAX_LISTED_CHARS = 1 << 20
#: Most unfinished versions of one StatusReply.
MAX_PENDING = 100
#: What is done with the values of a put when memory is full. 0 in a Put: as the store does by
#: default.
PINNED, SPILLABLE, EVICTABLE = 1, 2, 3


# ---- client to server ---------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First message. ``session``: token to join, empty to open a session."""

    id: int
    protocol: int
    session: bytes
    topology: Topology
    facts: ClientFacts


class PutItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value of a put: ``data`` if it rides inline, else ``nbytes`` of segment are granted.

    ``part``: it is this shard of the tensor that ``meta`` describes; several items of one put may
    be shards of one key. In a put of a state dict ``key`` is the entry's name, ``path`` its place
    in the nested dict (encoded by the client; empty: the name itself), and ``same_as`` the index
    of an earlier item that it shares its bytes with (tied weights), or -1.
    """

    key: str
    meta: ValueMeta
    nbytes: int
    data: bytes | None = None
    part: TensorSlice | None = None
    path: bytes = b""
    same_as: int = -1


class Publication(msgspec.Struct, frozen=True, array_like=True):
    """What makes the items of a put entries of the state dict ``key``.

    Args:
        participant: which one puts this.
        participants: how many of them make a version.
        partial: entries that no participant puts are those of the version before.
        keep: how many versions stay readable; 0: as before.
        packed: a get of the key gives it packed.
    """

    key: str
    participant: str
    participants: int
    partial: bool = False
    keep: int = 0
    packed: bool = False


class Put(Message, frozen=True, tag="put"):
    """Begin a put. With all items inline it commits at once (reply :class:`Committed`).

    ``version``: the version to be, for every key; 0: the next one. ``when_full``: what is done with
    the values when memory is full: PINNED, SPILLABLE, EVICTABLE, or 0.
    """

    id: int
    txn: int
    items: list[PutItem]
    version: int = 0
    group: Publication | None = None
    when_full: int = 0


class Commit(Message, frozen=True, tag="commit"):
    """Flip all keys of a put to their new versions at once. Reply :class:`Committed`."""

    id: int
    txn: int


class Abort(Message, frozen=True, tag="abort"):
    """Give up puts. Their granted memory is reused: the client has stopped writing to it. Of what
    it has written to the volumes ``unsettled``, by the transports named there, some may still
    arrive: first, they are to end that as for a :class:`Settle`.
    """

    txns: list[int]
    unsettled: list[tuple[int, str]] = []


#: Offset and shape of a piece of a tensor, in elements.
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Want(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a get wants: a key, at a version (0: the newest), and which piece (None: all)."""

    key: str
    version: int = 0
    box: Box | None = None


class Locate(Message, frozen=True, tag="locate"):
    """Find values and lease them under ``lease``. All or nothing, one consistent cut.

    Values of at most ``inline_max`` bytes in all come inside the reply; they need no lease.
    ``avoid``: volumes that the client cannot reach; a copy elsewhere is named if there is one.
    """

    id: int
    lease: int
    wants: list[Want]
    inline_max: int
    avoid: list[int] = []


class Fetch(Message, frozen=True, tag="fetch"):
    """Find a state dict and lease entries of it under ``lease``. Reply :class:`Fetched`.

    ``version`` 0: the newest. ``wants``: names of entries, and which pieces (their versions do not
    count); None: all entries, whole. A name that does not exist is reported, not an error.
    ``avoid``: see :class:`Locate`.
    """

    id: int
    lease: int
    key: str
    version: int
    wants: list[Want] | None
    inline_max: int
    avoid: list[int] = []


class Release(Message, frozen=True, tag="release"):
    """Give back leases: whole ones, or some values of one.

    The values of a lease are numbered in the order of the reply's entries: one for an entry that
    is one value, one for each part of an entry in parts.
    """

    leases: list[int]
    parts: list[tuple[int, list[int]]] = []


class Keep(Message, frozen=True, tag="keep"):
    """No reply. This process page-locks pool memory: none of it may go back to the system while
    the session lives, or the device would go on reading and writing the old pages.
    """


class Delete(Message, frozen=True, tag="delete"):
    """Delete keys; ``strict``: all must exist, else nothing is deleted. Reply :class:`Deleted`."""

    id: int
    keys: list[str]
    strict: bool


class Exists(Message, frozen=True, tag="exists"):
    """Reply :class:`Flags`, one per key. Of no keys, it says that what came before is done."""

    id: int
    keys: list[str]


class Keys(Message, frozen=True, tag="keys"):
    """Reply :class:`KeyList`: sorted keys that start with ``prefix``."""

    id: int
    prefix: str


class Wait(Message, frozen=True, tag="wait"):
    """Reply :class:`Committed` once every key exists with at least ``min_version``."""

    id: int
    keys: list[str]
    min_version: int


class Cancel(Message, frozen=True, tag="cancel"):
    """Forget the Wait of this id, or the rest of a long reply: nobody waits for it any more."""

    request: int


class Unmet(Message, frozen=True, tag="unmet"):
    """Reply :class:`UnmetKeys`: what a Wait for these keys waits for now. It waits for nothing."""

    id: int
    keys: list[str]
    min_version: int


class Versions(Message, frozen=True, tag="versions"):
    """Reply :class:`Committed`: the versions of a key that can be read, ascending."""

    id: int
    key: str


class Stat(Message, frozen=True, tag="stat"):
    """Reply :class:`StatReply`."""

    id: int
    key: str


class List(Message, frozen=True, tag="list"):
    """Reply :class:`Listing`: a page of what is known of the keys that start with ``prefix``.

    ``after``: where the last page ended; empty for the first one. A page is one consistent cut,
    several pages are not.
    """

    id: int
    prefix: str
    after: str = ""


class Status(Message, frozen=True, tag="status"):
    """Reply :class:`StatusReply`."""

    id: int


class Handshake(Message, frozen=True, tag="handshake"):
    """Ask the server half of a volume's transport. Reply :class:`Handshaken`."""

    id: int
    volume: int
    transport: str
    data: bytes


class Settle(Message, frozen=True, tag="settle"):
    """Have the server half of one of a volume's transports end what it has under way for this
    session, because the outcome of a write is uncertain. Reply :class:`Done`. Puts that are aborted
    meanwhile keep their memory until then.

    ``transport``: its name; empty, or unknown to the volume: all halves.
    """

    id: int
    volume: int
    transport: str = ""


class Shutdown(Message, frozen=True, tag="shutdown"):
    """End the server. Reply :class:`Done`, then every connection closes. From a member, see
    ``server.members``: leave. Reply :class:`Flags`, one: whether the server ends with it.
    """

    id: int


Request = (
    Hello
    | Put
    | Commit
    | Abort
    | Locate
    | Fetch
    | Release
    | Keep
    | Delete
    | Exists
    | Keys
    | Wait
    | Cancel
    | Unmet
    | Versions
    | Stat
    | List
    | Status
    | Attach
    | Warm
    | ProcessDied
    | PeerReply
    | Handshake
    | Settle
    | Shutdown
)

# ---- server to client ---------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """The connection stands. ``session``: token that further channels join with.

    ``warm``: see :class:`Warmed`. ``transport``: see ``contracts.strategy.Strategy``. ``via``:
    where the relay is that carries it; None: there is none. ``owner``: pid of the process that the
    store ends with; 0: none.
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


class Grant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a value's bytes lie: volume (index), segment, byte offset."""

    volume: int
    segment: int
    offset: int


class Granted(Message, frozen=True, tag="granted"):
    """Where to write, one for each item that came without data and is not ``same_as`` another, in
    order. None: nothing is to be written, another participant puts these very bytes.

    Of values with copies the same comes again for each further copy, with None for what has none.
    """

    id: int
    grants: list[Grant | None]
    continued: bool = False


class Committed(Message, frozen=True, tag="committed"):
    """The versions, one for each item of the put or key of the wait, in order; of a state dict
    one for all.
    """

    id: int
    versions: list[int]


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored shard: its place in the tensor, and inline ``data`` or a ``grant``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    data: bytes | None
    grant: Grant | None


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One located value: inline ``data``, or a ``grant`` to read from under the lease.

    ``parts``: it lies in shards, and these are the ones that hold some of what is wanted. A state
    dict has none of the three: see :class:`Fetch`. ``nbytes`` is that of the whole value.
    ``resumed``: in a page, further ``parts`` of the entry that the page before ended with.
    """

    version: int
    meta: ValueMeta
    nbytes: int
    data: bytes | None = None
    grant: Grant | None = None
    parts: list[Part] | None = None
    resumed: bool = False


class Located(Message, frozen=True, tag="located"):
    """The entries, in the order of the wants. ``leased``: whether the lease is held."""

    id: int
    entries: list[Entry]
    leased: bool
    continued: bool = False


class Fetched(Message, frozen=True, tag="fetched"):
    """Entries of one version of a state dict, in the order of the wants.

    Args:
        entries: None for a want that is not in it.
        names, paths: of the entries, in order, if all were wanted; else the names (and no paths)
            of the entries that nobody wanted.
        same_as: ``[i, j]``: entry ``i`` shares its bytes with the earlier entry ``j``.
        leased: whether the lease is held.
    """

    id: int
    version: int
    entries: list[Entry | None]
    names: list[str]
    paths: dict[int, bytes]
    same_as: list[tuple[int, int]]
    leased: bool
    continued: bool = False


class Handshaken(Message, frozen=True, tag="handshaken"):
    """What the server half has answered."""

    id: int
    data: bytes


class Deleted(Message, frozen=True, tag="deleted"):
    """How many keys were deleted."""

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
    """What is known of one key."""

    id: int
    found: Found


class Listing(Message, frozen=True, tag="listing"):
    """A page of keys, sorted. ``more``: ask again, with ``after`` the last key of this page.

    ``pending``: the versions of the same range of keys that are not whole, by key; of a key that
    has no other one there is no entry.
    """

    id: int
    entries: list[Listed]
    more: bool
    pending: list[Pending] = []


class StatusReply(Message, frozen=True, tag="status-reply"):
    """What is known of the store."""

    id: int
    status: StatusReport


class Done(Message, frozen=True, tag="done"):
    """Done; nothing to say."""

    id: int


class UnmetKey(msgspec.Struct, frozen=True, array_like=True):
    """A key that somebody waits for: its newest version (0: none), whether that is lost, and what
    is on its way, in short.
    """

    key: str
    version: int
    lost: bool = False
    pending: list[Pending] = []


class UnmetKeys(Message, frozen=True, tag="unmet-keys"):
    """The first of the keys that a Wait still waits for."""

    id: int
    keys: list[UnmetKey]


class Delayed(Message, frozen=True, tag="delayed"):
    """The reply will come later. ``why``: for an error, if it does not come in time."""

    id: int
    why: str


class Failure(Message, frozen=True, tag="failure"):
    """A typed error. ``id`` 0: it is about the connection, which closes."""

    id: int
    code: str
    message: str
    key: str | None = None
    details: dict[str, object] = {}


Reply = (
    Welcome
    | Granted
    | Committed
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
    | Done
    | Warmed
    | Prefault
    | Trim
    | WatchProcess
    | PeerHandshake
    | PeerGone
    | Lost
    | Delayed
    | Failure
)
