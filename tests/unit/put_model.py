"""What `test_joint_puts.py` knows of puts: what they bring, and what a version made of them is."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from msgspec import structs

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.server.controller import Controller
from torchstore_core.server.records import SessionRecord, Value, all_values
from torchstore_core.values import ObjectMeta, StateDictMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

KEYS = ("k", "l")
KEEP = {"k": 3, "l": 1}
ELEMENT = struct.Struct("<iiq")  # put, entry, index in the tensor
SHAPES = {"rows": (5, 3), "columns": (5, 3), "whole": (5, 3), "line": (7,)}
OTHER_SHAPE = (4, 2)
ENTRIES = ("", "w", "v", "all", "some", "tied", "own0", "own1", "own2")
EVERYTHING = 1 << 62


def cut(shape: tuple[int, ...], dim: int, index: int, count: int) -> Box:
    """The ``index``-th of ``count`` shards along ``dim``, as torch makes them: maybe empty."""
    size = -(-shape[dim] // count)
    start = min(index * size, shape[dim])
    offset, extents = [0] * len(shape), list(shape)
    offset[dim], extents[dim] = start, min(size, shape[dim] - start)
    return Box(tuple(offset), tuple(extents))


def elements(put: int, name: str, shape: tuple[int, ...], box: Box) -> bytes:
    """The bytes of a shard."""
    found: list[bytes] = []
    for at in itertools.product(*(range(n) for n in box.shape)):
        index = 0
        for here, start, extent in zip(at, box.offset, shape, strict=True):
            index = index * extent + start + here
        found.append(ELEMENT.pack(put, ENTRIES.index(name), index))
    return b"".join(found)


@dataclass(eq=False, repr=False)
class Put:
    """What one put brings to one key."""

    number: int
    key: str
    who: str = ""
    #: Only puts of one layout make a version.
    layout: Any = ""
    group: m.Publication | None = None
    #: By entry: the shape (None: an object), and the shards.
    claims: dict[str, tuple[tuple[int, ...] | None, list[Box]]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    paths: dict[str, bytes] = field(default_factory=dict)
    #: What of it is not stored by another put.
    stored: list[tuple[str, Box | None]] = field(default_factory=list)
    version: int = 0
    committed: bool = False
    plain: bool = False
    #: Where its version is among those that a commit answers.
    at: int = 0
    #: What somebody says who wants to put the rest of the same version.
    like: tuple[Any, ...] = ()


@dataclass(eq=False, repr=False)
class Client:
    """One process."""

    record: SessionRecord
    txns: dict[int, list[Put]] = field(default_factory=dict)
    leases: dict[int, list[tuple[m.Grant, bytes]]] = field(default_factory=dict)
    dead: bool = False


Snapshot = dict[str, Any]


def an_object(put: Put, name: str) -> m.PutItem:
    """Something that is no tensor."""
    put.claims[name] = None, []
    data = ELEMENT.pack(put.number, ENTRIES.index(name), 0)
    return m.PutItem(f"{name or put.key}", ObjectMeta("x"), len(data), data)


def with_path(put: Put, item: m.PutItem) -> m.PutItem:
    """Most entries lie somewhere in the nested dict."""
    if put.number % 3 == 0:
        return item
    put.paths[item.key] = f"{put.number} {item.key}".encode()
    return structs.replace(item, path=put.paths[item.key])


def shards(
    put: Put,
    name: str,
    layout: str,
    index: int,
    count: int,
    other_shape: bool,
    mesh: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> list[m.PutItem]:
    """What a participant puts of a tensor."""
    shape = SHAPES["line" if name == "v" else layout]
    if name == "w" and other_shape:
        shape = OTHER_SHAPE
    found = [cut(shape, 1 if layout == "columns" and len(shape) == 2 else 0, index, count)]
    if name in ("all", "tied") or layout == "whole":
        found = [boxes.whole(shape)]
    elif name == "some":  # the first one has all of it, in two parts; the others nothing
        found = [cut(shape, 0, at, 2) if index == 0 else Box((5, 0), (0, 3)) for at in (0, 1)]
        found = found[: 2 if index == 0 else 1]
    put.claims[name] = shape, found
    meta = TensorMeta("complex128", shape)
    items: list[m.PutItem] = []
    for box in found:
        part: TensorSlice | None = TensorSlice(box.offset, box.shape, shape, *mesh)
        if name and box == boxes.whole(shape):
            part = None
        data = elements(put.number, name, shape, box)
        items.append(m.PutItem(name or put.key, meta, len(data), data, part))
    return items


def state_dict(
    put: Put, names: Sequence[str], layout: str, index: int, count: int, other_shape: bool
) -> list[m.PutItem]:
    """What a participant puts of a state dict."""
    items: list[m.PutItem] = []
    at: dict[str, int] = {}
    for name in names:
        at[name] = len(items)
        if name.startswith("own"):
            items.append(an_object(put, name))
        elif name == "tied" and "all" in at:
            put.aliases[name] = "all"
            items.append(m.PutItem(name, ObjectMeta("x"), 0, b"", same_as=at["all"]))
        else:
            items += shards(put, name, layout, index, count, other_shape)
    return [with_path(put, item) for item in items]


def read(controller: Controller, key: str, version: int) -> Snapshot:
    """Everything of a version, as its bytes."""
    record = next(iter(controller.sessions.values()))
    want = m.Locate(1, 1 << 40, [m.Want(key, version)], EVERYTHING)
    ((entry,), leased) = controller.locate(record, want)
    assert not leased
    assert entry.version == version
    if not isinstance(entry.meta, StateDictMeta):
        return {"": content(entry)}
    fetch = m.Fetch(1, 1 << 40, key, version, None, EVERYTHING)
    fetched = controller.fetch(record, fetch)
    assert fetched.version == version
    assert len(fetched.names) == len(fetched.entries) == entry.meta.entries
    seen: Snapshot = {}
    for name, one in zip(fetched.names, fetched.entries, strict=True):
        assert one is not None
        seen[name] = content(one)
    seen["paths"] = {fetched.names[at]: path for at, path in fetched.paths.items()}
    seen["same"] = {fetched.names[i]: fetched.names[j] for i, j in fetched.same_as}
    return seen


def leased(controller: Controller) -> Iterator[Value]:
    """All that readers hold."""
    for session in controller.sessions.values():
        for held in session.leases.values():
            yield from (value for value in held if value is not None)


def reachable(controller: Controller) -> Iterator[Value]:
    """All that somebody will let go of some day."""
    yield from leased(controller)
    for stored in controller.catalog.newest.values():
        yield from all_values(stored)
    for group in controller.catalog.groups.values():
        for stored in group.history.values():
            yield from all_values(stored)
        for generation in group.pending.values():
            for contribution in generation.contributions.values():
                yield from (value for _, value in contribution.items)
    for session in controller.sessions.values():
        for txn in session.txns.values():
            yield from txn.values


def base_among(generations: Sequence[dict[str, Put]], seen: Snapshot) -> Snapshot:
    """What of a partial version comes from the last whole one of those before it."""
    for puts in reversed(generations):
        made = [put for put in puts.values() if put.group is not None and put.committed]
        names = {name for put in made for name in (*put.claims, *put.aliases)}
        if not made or len(made) < made[0].like[0] or not names <= set(seen):
            continue
        numbers = {put.number for put in made}
        return {
            name: one
            for name, one in seen.items()
            if name in ("paths", "same")
            or {ELEMENT.unpack(data[: ELEMENT.size])[0] for data in one[1].values()} <= numbers
        }
    raise AssertionError("there is none")


def content(entry: m.Entry) -> Any:
    """What is stored of an entry: its meta, and its bytes by box."""
    if entry.parts is None:
        assert entry.data is not None
        assert len(entry.data) == entry.nbytes
        shape = entry.meta.shape if isinstance(entry.meta, TensorMeta) else ()
        return entry.meta, {boxes.whole(shape): entry.data}
    assert isinstance(entry.meta, TensorMeta)
    assert entry.nbytes == prod(entry.meta.shape) * ELEMENT.size
    return entry.meta, {Box(part.offset, part.shape): part.data for part in entry.parts}


def uncovered(puts: list[Put]) -> list[tuple[str, Box]]:
    """Boxes that were put, or are being put, and are not committed."""
    ready: dict[str, list[Box]] = {}
    claimed: dict[str, Box] = {}
    for put in puts:
        for name, (shape, _) in put.claims.items():
            claimed[name] = boxes.whole(shape or ())
        if put.committed:
            for name, box in put.stored:
                ready.setdefault(name, []).append(claimed[name] if box is None else box)
    return [
        (name, box)
        for name, target in claimed.items()
        for box in boxes.missing(target, ready.get(name, ()))
    ]


def check_made_of(seen: Snapshot, puts: list[Put], base: Snapshot) -> None:
    """All that was put is there, nothing else is, and every element is what was put."""
    special = {"paths", "same"}
    by_number = {put.number: put for put in puts}
    claimed = {name for put in puts for name in (*put.claims, *put.aliases)}
    assert set(seen) - special == claimed | (set(base) - special)
    for name in set(seen) - special:
        if name not in claimed:
            assert seen[name] == base[name]
            continue
        meta, parts = seen[name]
        if not any(name in put.claims for put in puts):
            assert seen[name] == seen["all"]
            assert seen["same"].get(name) == "all" or seen["same"].get("all") == name
            continue
        for put in puts:
            shape, found = put.claims.get(name, (None, []))
            if isinstance(meta, TensorMeta) and name in put.claims:
                assert shape == meta.shape
                assert all(boxes.covers(box, parts) for box in found)
        shape = meta.shape if isinstance(meta, TensorMeta) else ()
        assert boxes.covers(boxes.whole(shape), parts)
        for box, data in parts.items():
            number, entry, _ = ELEMENT.unpack(data[: ELEMENT.size])
            put = by_number[number]
            assert entry == ENTRIES.index(name)
            assert data == elements(number, name, shape, box)
            own = put.claims[name][1] or [boxes.whole(())]
            assert box in own
    for name, path in seen.get("paths", {}).items():
        own_paths = [put.paths.get(name) for put in puts if name in (*put.claims, *put.aliases)]
        assert path in own_paths or (not own_paths and path == base["paths"][name])
    if "paths" in seen:
        for name in claimed:
            assert name in seen["paths"] or not any(name in put.paths for put in puts)


class Model:
    """What there is, and what is on its way.

    Attributes:
        pending: of each key, the puts for versions on their way, by participant.
        visible: of each key, what can be read, by version.
        highest: the highest version that each key ever had.
    """

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.catalog = controller.catalog
        self.pending: dict[str, dict[int, dict[str, Put]]] = {key: {} for key in KEYS}
        self.visible: dict[str, dict[int, Snapshot]] = {key: {} for key in KEYS}
        self.highest = dict.fromkeys(KEYS, 0)
        self._keep = dict.fromkeys(KEYS, 1)
        self._session_of: dict[Put, Client] = {}

    def mates(self, key: str, *, grouped: bool) -> list[Put]:
        """Puts for versions on their way, of state dicts or of tensors."""
        puts = [put for puts in self.pending[key].values() for put in puts.values()]
        return [put for put in puts if put.like and (put.group is not None) is grouped]

    def enters(self, client: Client, put: Put, version: int, request: m.Put) -> None:
        """The model's account of a put: which version it is for, and what of it is stored."""
        self._session_of[put] = client
        if put.plain:
            return
        put.version = version
        assert request.version in (0, version)
        group = self.catalog.groups.get(put.key)
        generation = None if group is None else group.pending.get(version)
        others = self.pending[put.key].setdefault(version, {})
        if generation is None and version <= self.highest[put.key]:  # late: it stores nothing
            del self.pending[put.key][version]
            return
        if any(other.layout != put.layout for other in others.values()):
            assert all(self._session_of[other].dead for other in others.values())
            others.clear()
        assert request.version or put.who not in others
        if generation is not None:
            items = generation.contributions[put.who].items
            put.stored = [(name, value.box) for name, value in items]
        alive = [o for o in others.values() if o.who != put.who and not self._session_of[o].dead]
        elsewhere = {stored for other in alive for stored in other.stored}
        assert not elsewhere.intersection(put.stored), "stored twice"
        others[put.who] = put

    def commits(self, puts: list[Put], versions: Sequence[int]) -> None:
        for put in puts:
            put.committed = True
            if put.plain:
                put.version = versions[put.at]
                self.pending[put.key][put.version] = {"": put}
            assert put.version == versions[put.at]

    def taken_back(self, puts: list[Put]) -> None:
        for put in puts:
            generation = self.pending[put.key].get(put.version, {})
            if generation.get(put.who) is put:
                del generation[put.who]
                if not generation:
                    del self.pending[put.key][put.version]

    def deleted(self, key: str) -> None:
        """All of a key is gone; its versions are not used again."""
        self.highest[key] = max([self.highest[key], *self.pending[key]])
        self.visible[key], self.pending[key], self._keep[key] = {}, {}, 1

    def reconcile(self, *, putting: Sequence[Put] = (), explicit: bool = False) -> None:
        """What the controller has now is what the model expects."""
        for key in KEYS:
            there = self.catalog.versions(key)
            assert there == sorted(set(there))
            for version in there:
                if version not in self.visible[key]:
                    self._appears(key, version)
            kept = list(self.visible[key])[-self._keep[key] :]
            self.visible[key] = {version: self.visible[key][version] for version in kept}
            assert there == kept
            self._compare_pending(key, [p.who for p in putting if p.key == key], explicit)

    def _appears(self, key: str, version: int) -> None:
        """A version is new, newer than all before, and made of what was put for it."""
        assert version > self.highest[key]
        puts = self.pending[key].pop(version)
        assert all(put.version == version for put in puts.values())
        done = [put for put in puts.values() if put.committed]
        base: Snapshot = {}
        seen = read(self.controller, key, version)
        if done[0].group is not None:
            assert len(done) >= done[0].group.participants
            if _is_partial(puts):
                base = self._base_of(key, version, seen)
            self._keep[key] = KEEP[key]
        check_made_of(seen, done, base)
        self.highest[key] = version
        self.visible[key][version] = seen
        for older in [v for v in self.pending[key] if v < version]:
            del self.pending[key][older]

    def _base_of(self, key: str, version: int, seen: Snapshot) -> Snapshot:
        """The version before a partial one. One that became whole in the same moment, and is not
        kept, was never to be seen: then that it is made of puts for one such version is enough.
        """
        earlier = [puts for v, puts in sorted(self.pending[key].items()) if v < version]
        for puts in earlier:  # it waits for what is older, unless nobody is left to finish that
            alive = any(not self._session_of[put].dead for put in puts.values())
            assert not alive or not uncovered(list(puts.values()))
        if self.is_manifest(key):
            return self.visible[key][self.highest[key]]
        return base_among(earlier, seen)

    def _compare_pending(self, key: str, putting: list[str], explicit: bool) -> None:
        """The same versions are on their way, by the same participants; none of them is whole."""
        seen = {p.version: p for p in self.catalog.pending(key)}
        older_are_dead = True
        for version, puts in sorted(self.pending[key].items()):
            state = seen.pop(version, None)
            left_over = any(self._session_of[put].dead for put in puts.values())
            for who, put in list(puts.items()):
                if state is not None and who in (*state.committed, *state.writing):
                    assert (who in state.committed) is put.committed
                    continue
                # Only what is left over of those that died, or put again, is thrown out, and only
                # by one that puts to the same key.
                assert putting
                assert left_over or (explicit and who in putting)
                del puts[who]
            if not puts:
                assert state is None
                del self.pending[key][version]
                continue
            assert state is not None
            assert {*state.committed, *state.writing} == set(puts)
            missing = uncovered(list(puts.values()))
            assert {name for name, _, _ in state.missing} == {name for name, _ in missing}
            for name, offset, shape in state.missing:
                assert any(n == name and b.contains(Box(offset, shape)) for n, b in missing)
            group = next(iter(puts.values())).group
            done = sum(put.committed for put in puts.values())
            waits = group is not None and (
                done < group.participants
                or (_is_partial(puts) and not (self.is_manifest(key) and older_are_dead))
            )
            assert waits or missing, "it is whole, but not visible"
            older_are_dead &= all(self._session_of[put].dead for put in puts.values())
        assert not seen

    def is_manifest(self, key: str) -> bool:
        return bool(self.visible[key]) and "paths" in self.visible[key][self.highest[key]]

    def newest_of(self, name: str) -> int:
        """The newest version of a key, or of an entry; 0 if it has none."""
        key, _, entry = name.partition("/")
        newest = max(self.visible[key], default=0)
        if not newest or (entry and ("paths" not in (there := self.visible[key][newest]))):
            return 0
        return newest if not entry or entry in there else 0


def _is_partial(puts: dict[str, Put]) -> bool:
    return any(put.group is not None and put.group.partial for put in puts.values())
