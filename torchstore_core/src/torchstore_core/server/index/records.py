"""The controller's records: stored values, unfinished puts, sessions and waiters."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import msgspec

from torchstore_core import moments
from torchstore_core.boxes import Box
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import TorchStoreError
from torchstore_core.machine.topology import Topology
from torchstore_core.values import StateDictMeta, TensorMeta, ValueMeta
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.server.index.collective.participants import Contribution
    from torchstore_core.server.index.key_history import PutTarget

_MAX_ENDED_EARLY = 100_000


@final
class Value(msgspec.Struct, eq=False, gc=False):
    """Immutable bytes: inline ``data``, or a range of a volume's segment.

    They are a whole value, or the shard ``box`` of the tensor that ``meta`` describes.

    Args:
        created: when the value was committed, in seconds since the epoch; 0 before that.
        pins: how many leases hold it.
        uses: how many other holders it has: keys, state dicts, and the put that creates it. Its
            memory can be freed when ``pins`` and ``uses`` are both 0.
        more: the volumes and offsets of further copies, none of which is lost. If ``volume`` is
            lost, there are none.
    """

    key: str
    meta: ValueMeta
    nbytes: int
    volume: int
    data: bytes | None
    offset: int
    creator: ClientFacts
    version: int = 0
    created: float = 0.0
    pins: int = 0
    uses: int = 0
    box: Box | None = None
    more: tuple[tuple[int, int], ...] = ()

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The volume and offset of every copy; empty for an inline value."""
        if self.data is not None:
            return ()
        return ((self.volume, self.offset), *self.more)


@final
class Shards(msgspec.Struct, eq=False):
    """A tensor stored as shards, by their boxes. The boxes may overlap."""

    key: str
    meta: TensorMeta
    creator: ClientFacts
    parts: dict[Box, Value]
    nbytes: int = 0
    version: int = 0
    created: float = 0.0


Entry = Value | Shards
_Before = tuple[Entry | None, bytes]


@final
class Manifest(msgspec.Struct, eq=False):
    """One version of a state dict.

    A partial version and those that it builds on are a *chain*. The newest of it has all entries,
    in dicts that the next one takes over; each older one has only what the one after it replaced.
    So a small put is cheap, and so is the end of a version, however many entries there are. Every
    value counts one holder for each place in the chain where it is.

    Attributes:
        holders: how many there are of this version: its key, references, branches.
        newer, older: its neighbours in the chain.
        replaced: the entries that ``newer`` has others for, with their paths; None: it had none.
    """

    key: str
    _entries: dict[str, Entry]  # of the whole chain, as the newest has them; else empty
    _paths: dict[str, bytes]  # see ``messages.PutItem``
    creator: ClientFacts
    version: int
    created: float
    packed: bool = False
    holders: int = 1
    newer: Manifest | None = None
    older: Manifest | None = None
    replaced: dict[str, _Before] = {}
    _ordered: list[str] = []

    @property
    def entries(self) -> dict[str, Entry]:
        """All entries, by name; see :meth:`contents`."""
        return self.contents()[0]

    def contents(self) -> tuple[dict[str, Entry], dict[str, bytes]]:
        """All entries and paths, by name, not to be changed. Those of an older version are
        collected, in time proportional to their number.
        """
        if self.newer is None:
            return self._entries, self._paths
        (newest, *others) = reversed(list(self._newer()))
        entries, paths = dict(newest._entries), dict(newest._paths)
        for at in others:
            _go_back(entries, paths, at.replaced)
        return entries, paths

    def entry(self, name: str) -> Entry | None:
        """The entry of that name; None if there is none."""
        at = self
        while at.newer is not None:
            if (before := at.replaced.get(name)) is not None:
                return before[0]
            at = at.newer
        return at._entries.get(name)

    def _newer(self) -> Iterator[Manifest]:
        """It, and the newer versions of its chain."""
        at: Manifest | None = self
        while at is not None:
            yield at
            at = at.newer

    def chain(self) -> Iterator[Manifest]:
        """All versions of its chain, the newest first."""
        (*_, at) = self._newer()
        yield at
        while at.older is not None:
            at = at.older
            yield at

    def own_values(self) -> Iterable[Value]:
        """The values of its place in the chain, a tied one once for each of its names."""
        if self.newer is None:
            return _values_of(self._entries.values())
        return _values_of([entry for entry, _ in self.replaced.values() if entry is not None])

    def build_on(self, base: Manifest) -> None:
        """Take from ``base`` the entries that this version, which is new, does not have."""
        own, own_paths = self._entries, self._paths
        if base.newer is None:
            entries, paths = base._entries, base._paths
            self.older, base.newer = base, self
            base._entries, base._paths = {}, {}
            base.replaced = {name: (entries.get(name), paths.get(name, b"")) for name in own}
        else:  # something holds a version after it that is no longer the key's
            entries, paths = base.contents()
            retain(_values_of([entry for name, entry in entries.items() if name not in own]))
        before = len(entries)
        entries.update(own)
        for name in own:
            paths.pop(name, None)
        paths.update(own_paths)
        self._entries, self._paths = entries, paths
        if len(entries) == before:
            self._ordered = base._ordered

    def leave_chain(self) -> list[Value]:
        """Nothing holds the version any more. Returns the values that nothing holds any more."""
        newer, older = self.newer, self.older
        self.newer = self.older = None
        gone: list[Entry] = []
        if newer is not None:
            newer.older = older
            if older is not None:
                older.newer = newer
            for name, before in self.replaced.items():
                if older is not None and name not in older.replaced:
                    older.replaced[name] = before
                elif before[0] is not None:
                    gone.append(before[0])
        elif older is not None:  # which is the newest now
            gone = _go_back(self._entries, self._paths, older.replaced)
            older._entries, older._paths = self._entries, self._paths
            older.newer, older.replaced = None, {}
        else:
            gone += self._entries.values()
        self._entries, self._paths, self.replaced = {}, {}, {}
        return release(_values_of(gone))

    def ordered(self) -> list[str]:
        """Return the sorted names of its entries; they are sorted on the first call."""
        entries = self.entries
        if len(self._ordered) != len(entries):
            self._ordered = sorted(entries)
        return self._ordered

    @property
    def nbytes(self) -> int:
        """The bytes of all entries; tied entries count once."""
        return sum([entry.nbytes for entry in {id(e): e for e in self.entries.values()}.values()])

    @property
    def meta(self) -> StateDictMeta:
        return StateDictMeta(len(self.entries), self.packed)


def _go_back(
    entries: dict[str, Entry], paths: dict[str, bytes], replaced: dict[str, _Before]
) -> list[Entry]:
    """Make the entries of a version those of the one before it; returns the ones that go."""
    gone: list[Entry] = []
    for name, (entry, path) in replaced.items():
        gone.append(entries[name])
        if entry is None:
            del entries[name]
        else:
            entries[name] = entry
        paths.pop(name, None)
        if path:
            paths[name] = path
    return gone


def _values_of(entries: Collection[Entry]) -> Iterable[Value]:
    whole = [entry for entry in entries if type(entry) is Value]
    if len(whole) == len(entries):
        return whole
    return (value for entry in entries for value in all_values(entry))


Stored = Value | Shards | Manifest


class Change(NamedTuple):
    """The effect of a transition of the index.

    Args:
        freed: values that nothing holds any more, whose memory can be reused.
        visible: keys of which a generation has become the newest version.
        rewound: keys that began a new timeline, and whether any readable version of them is gone.
    """

    freed: Sequence[Value] = ()
    visible: Sequence[str] = ()
    rewound: Sequence[tuple[str, bool]] = ()

    @classmethod
    def of(cls, changes: Iterable[Change]) -> Change:
        """Combine several changes into one."""
        freed: list[Value] = []
        visible: list[str] = []
        rewound: list[tuple[str, bool]] = []
        for change in changes:
            freed += change.freed
            visible += change.visible
            rewound += change.rewound
        return cls(freed, visible, rewound)


def all_values(stored: Stored) -> Iterable[Value]:
    if type(stored) is Value:
        return (stored,)
    if type(stored) is Shards:
        return stored.parts.values()
    return _values_of(stored.entries.values())


def values_in(stored: Stored, box: m.Box | None) -> Collection[Value]:
    """Return the values that contain parts of ``box`` of ``stored`` (None: all of it)."""
    if type(stored) is Value:
        return (stored,)
    if type(stored) is not Shards:
        return ()
    if box is None or len(box[0]) != len(stored.meta.shape):
        return stored.parts.values()
    wanted = [(start, start + extent) for start, extent in zip(*box, strict=False)]
    return [
        value
        for part, value in stored.parts.items()
        if all(
            start < at + extent and at < end
            for (start, end), at, extent in zip(wanted, *part, strict=False)
        )
    ]


def retain(values: Iterable[Value]) -> None:
    """Add one holder to each value."""
    for value in values:
        value.uses += 1


def release(values: Iterable[Value]) -> list[Value]:
    """Remove one holder from each value. Returns the values that nothing holds any more."""
    freed: list[Value] = []
    for value in values:
        value.uses -= 1
        if not (value.uses or value.pins):
            freed.append(value)
    return freed


def retain_version(stored: Stored) -> None:
    """Add one holder to a version."""
    if type(stored) is Manifest:
        stored.holders += 1
    else:
        retain(all_values(stored))


def release_version(stored: Stored) -> list[Value]:
    """Remove one holder from a version. Returns the values that nothing holds any more."""
    if type(stored) is not Manifest:
        return release(all_values(stored))
    stored.holders -= 1
    return [] if stored.holders else stored.leave_chain()


class Txn(msgspec.Struct, eq=False):
    """An unfinished put: a client is writing its values into the memory granted for them.

    Args:
        values: all values that the put creates.
        granted: bytes of memory granted for them, by volume.
        plain: the values that become versions of their keys by themselves.
        contributions: its contributions to generations, see ``index.collective.generations``.
        results: the values and targets whose versions the commit returns, in order.
        when_full: what is done with its values when memory is full, see ``messages.Put``.
        held_as: it makes an object without a key, which its session holds by this id, from this
            line of the program on.
        copy_of: it makes further copies of these values, which are stored already: in each of its
            own values one of them.
    """

    values: list[Value]
    granted: dict[int, int]
    plain: list[Value]
    contributions: list[tuple[PutTarget, Contribution]]
    results: Sequence[Value | PutTarget]
    when_full: int = m.PINNED
    held_as: tuple[int, str] | None = None
    copy_of: Sequence[Value] = ()

    @property
    def nbytes(self) -> int:
        """The memory granted to the put on all volumes together, in bytes."""
        return sum(self.granted.values())


class HeldVersion(msgspec.Struct, eq=False):
    """A version that is held, see ``index.references.holds``.

    Args:
        count: by how many sessions and tickets; one that holds it twice counts twice.
        freed: it was taken from those that hold it.
    """

    key: str
    version: int
    stored: Stored
    timeline: int = 0
    count: int = 0
    freed: bool = False


class Hold(msgspec.Struct, eq=False):
    """One hold of a version: since when, in seconds since the epoch, and from which line."""

    version: HeldVersion
    since: float
    where: str = ""


class SessionRecord(msgspec.Struct, eq=False):
    """One client session and everything that it holds."""

    token: bytes
    facts: ClientFacts
    topology: Topology
    txns: dict[int, Txn] = {}
    leases: dict[int, list[Value | None]] = {}
    holds: dict[int, Hold] = {}
    tickets: set[int] = set()  # that it has sent, see ``index.references.holds``
    #: Ids of leases, puts and holds that were ended before the requests that begin them arrived
    #: over another, slower connection.
    ended_early: set[int] = set()
    keeps_memory: bool = False  # see messages.Keep
    serial: int = 0  # of the session in a log, see server.keeping
    channels: int = 0  # that are connected
    #: The id by which transports know the client, and the volumes whose server halves know it.
    peer: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(8))
    met: set[int] = set()
    handshakes_weight: int = 0  # of those that are under way
    ending: bool = False
    meets: bool = True  # whether it may make handshakes: until it, or its process, has ended
    opened: float = msgspec.field(default_factory=lambda: moments.monotonic())
    closed: float | None = None

    @property
    def is_holder(self) -> bool:
        """Whether it is there for holds alone: of a process that has received a reference before it
        has joined the store, or was forked while it had some. It needs no event loop and no thread,
        and reads nothing. It ends with its connection, not with the process that has opened it:
        that may be the parent of the one that has it.
        """
        return self.facts.role == m.HOLDER_ROLE

    def end_early(self, ident: int) -> None:
        """End what has not begun yet: when it does, it is refused."""
        if len(self.ended_early) < _MAX_ENDED_EARLY:
            self.ended_early.add(ident)

    def was_ended_early(self, ident: int) -> bool:
        """Whether what begins now was ended before; the id may begin something else afterwards."""
        if ident not in self.ended_early:
            return False
        self.ended_early.discard(ident)
        return True

    def end(self) -> None:
        """Record that the session's process has ended or left the store."""
        if self.closed is None:
            self.closed = moments.monotonic()


class Versions(list[int]):
    """The versions that a put made, when keys have been rewound: with the timeline of each."""

    def __init__(self, versions: Iterable[int], timelines: Iterable[int]) -> None:
        super().__init__(versions)
        self.timelines = list(timelines)


class Waiter(msgspec.Struct, eq=False):
    """A Wait request that has not been answered yet.

    Args:
        timeline: that of version ``min_version - 1``, which the wait follows; -1: it follows none.
        fail: called instead of ``reply`` when the version cannot come any more.
        look: for a request that waits for some of its keys: answers it if that is possible, and
            returns how many of them must change at least before it is; 0: it has.
        left: how many of these have not changed yet.
        at: for one that waits for all of its keys, the position of one that was missing.
    """

    keys: list[str]
    min_version: int
    reply: Callable[[list[int]], None]
    timeline: int = -1
    fail: Callable[[TorchStoreError], None] | None = None
    look: Callable[[], int] | None = None
    left: int = 0
    at: int = 0
