"""What `test_joint_puts.py` knows of puts: what they bring, and what a version made of them is."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from msgspec import structs

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord, Value, all_values
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

    @property
    def line(self) -> tuple[bool, Any]:
        """Puts without a version look only for versions of their own line."""
        return self.group is not None, self.layout

    @property
    def brought(self) -> Iterator[tuple[str, Box | None]]:
        """What it would store if it were alone."""
        for name, (shape, found) in self.claims.items():
            if shape is None:
                yield name, None
            yield from ((name, box) for box in found if not box.is_empty)


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
    for group in controller.catalog.histories.values():
        for stored in group.kept.values():
            yield from all_values(stored)
        for branch in group.branches.values():
            if branch.base is not None:
                yield from all_values(branch.base)
        for generation in group.generations():
            for contribution in generation.contributions.values():
                yield from contribution.values
    for session in controller.sessions.values():
        for txn in session.txns.values():
            yield from txn.values


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


def names_of(puts: Sequence[Put]) -> set[str]:
    return {name for put in puts for name in (*put.claims, *put.aliases)}


def check_made_of(seen: Snapshot, layers: Sequence[Sequence[Put]], base: Snapshot) -> None:
    """All that was put is there, nothing else is, and every element is what was put.

    Args:
        layers: the puts of each version above ``base``, one after the other; of every entry those
            count that brought it last.
    """
    special = {"paths", "same"}
    owners = {name: puts for puts in layers for name in names_of(puts)}
    assert set(seen) - special == set(owners) | (set(base) - special)
    for name in set(seen) - special:
        puts = owners.get(name)
        if puts is None:
            assert seen[name] == base[name]
            continue
        source = name
        if not any(name in put.claims for put in puts):  # then it is tied
            source = "all"
            if owners["all"] is puts:
                assert seen[name] == seen["all"]
                assert seen["same"].get(name) == "all" or seen["same"].get("all") == name
        check_entry(seen[name], source, puts)
    paths: dict[str, bytes] = seen.get("paths", {})
    for name, path in paths.items():
        own_paths = [put.paths.get(name) for put in owners.get(name, ()) if brings(put, name)]
        assert path in own_paths or (name not in owners and path == base["paths"][name])
    if "paths" in seen:
        for name, puts in owners.items():
            assert (name in paths) is any(name in put.paths for put in puts)
        assert {name for name in base.get("paths", ()) if name not in owners} <= set(paths)


def brings(put: Put, name: str) -> bool:
    return name in put.claims or name in put.aliases


def check_entry(seen: Any, name: str, puts: Sequence[Put]) -> None:
    """An entry is what was put as ``name``, all of it."""
    by_number = {put.number: put for put in puts}
    meta, parts = seen
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
        self._is_dict = dict.fromkeys(KEYS, False)  # the newest that can be read
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
        group = self.catalog.histories.get(put.key)
        generation = None if group is None else group.pending.get(version)
        others = self.pending[put.key].setdefault(version, {})
        if generation is None and version <= self.highest[put.key]:  # late: it stores nothing
            del self.pending[put.key][version]
            return
        if any(other.layout != put.layout for other in others.values()):
            assert all(self._session_of[other].dead for other in others.values())
            others.clear()
        assert request.version or put.who not in others
        alive = [o for o in others.values() if o.who != put.who and not self._session_of[o].dead]
        elsewhere = {stored for other in alive for stored in other.stored}
        if generation is not None:
            one = generation.contributions[put.who]
            put.stored = [
                (name, value.box) for name, value in zip(one.names, one.values, strict=True)
            ]
        else:  # it was inline, and what it belongs to became whole at once
            put.stored = [one for one in put.brought if not {one, (one[0], None)} & elsewhere]
        assert not elsewhere.intersection(put.stored), "stored twice"
        others[put.who] = put

    def commits(self, puts: list[Put], versions: Sequence[int]) -> None:
        for put in puts:
            put.committed = True
            if put.plain:
                put.version = versions[put.at]
                put.stored = [("", None)]
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

    def reconcile(self, *, putting: Sequence[Put] = (), version: int = 0) -> None:
        """What the controller has now is what the model expects.

        Args:
            putting: the puts of the request, if it was one: also when it was refused.
            version: the one that it named; 0 if it named none.
        """
        for key in KEYS:
            mine = [put for put in putting if put.key == key]
            there = {state.version: state for state in self.catalog.pending(key)}
            doubtful = self._throw_out(key, there, mine, version)
            self._become_visible(key, doubtful)
            for gone in doubtful:
                self.pending[key].pop(gone, None)
            self._compare_pending(key, there)

    def _throw_out(
        self, key: str, there: dict[int, m.Pending], putting: list[Put], named: int
    ) -> set[int]:
        """Only what is left over of those that died, or put again, is thrown out, and only by one
        that puts to the same versions. Those of which nothing is left may have become visible
        instead, or be overtaken.
        """
        doubtful: set[int] = set()
        behind = self._far_behind(key, putting)
        for version, puts in self.pending[key].items():
            if not putting or (named not in (0, version) and version not in behind):
                continue
            dead = any(self._session_of[put].dead for put in puts.values())
            ours = {put.line for put in puts.values()} & {put.line for put in putting}
            again = any(put.who in puts for put in putting)
            left_over = dead and (named or ours)
            if not (left_over or (named and again) or version in behind):
                continue
            state = there.get(version)
            if state is None:
                doubtful.add(version)
                continue
            for who in set(puts) - {*state.committed, *state.writing}:
                del puts[who]
        return doubtful

    def _far_behind(self, key: str, putting: list[Put]) -> set[int]:
        """Those that may be dropped because a version of their line begins: of all that nobody is
        writing the oldest, but for 15, and none that alone brings something in its turn.
        """
        found: set[int] = set()
        for put in putting:
            waiting = {
                version: list(puts.values())
                for version, puts in sorted(self.pending[key].items())
                if version != put.version
                and all(other.line == put.line and other.committed for other in puts.values())
            }
            for version in list(waiting)[:-15]:
                later = [p for v, p in waiting.items() if v > version and _is_complete(p)]
                others = {name for puts in later for name in names_of(puts)}
                mine = waiting[version]
                in_turn = _is_complete(mine) and any(p.group and p.group.partial for p in mine)
                if not in_turn or names_of(mine) <= others:
                    found.add(version)
        return found

    def _become_visible(self, key: str, doubtful: Collection[int]) -> None:
        """Every version that is whole now is the newest for a moment, one after the other; those
        before it are not wanted any more. Of those that are kept we see what they are made of.
        """
        visible = self.visible[key]
        base = visible[self.highest[key]] if visible else {}
        layers: list[list[Put]] = []
        fresh: dict[int, tuple[Snapshot, list[list[Put]]]] = {}
        while (version := self._next_whole(key, doubtful)) is not None:
            assert version > self.highest[key]
            puts = self.pending[key][version]
            assert all(put.version == version for put in puts.values())
            if not _is_partial(puts):
                base, layers = {}, []
            done = [put for put in puts.values() if put.committed]
            layers.append(done)
            fresh[version] = base, list(layers)
            self.pending[key] = {v: p for v, p in self.pending[key].items() if v > version}
            self.highest[key] = version
            self._is_dict[key] = done[0].group is not None
            if done[0].group is not None:
                self._keep[key] = KEEP[key]
            visible[version] = {}
            for old in list(visible)[: -self._keep[key]]:
                del visible[old]
        assert self.catalog.versions(key) == list(visible)
        for version, (before, made) in fresh.items():
            if version in visible:
                visible[version] = read(self.controller, key, version)
                check_made_of(visible[version], made, before)

    def _next_whole(self, key: str, doubtful: Collection[int]) -> int | None:
        """The first version on its way that all have put, and that waits for no older one."""
        nobody_waits = True
        for version, puts in sorted(self.pending[key].items()):
            whole = _is_complete(list(puts.values()))
            if _is_partial(puts):
                # The rest is that of the one right before it, unless nobody is left to finish that.
                whole &= self.is_manifest(key) and nobody_waits
            if whole:
                return version
            dead = all(self._session_of[put].dead for put in puts.values())
            nobody_waits &= dead or version in doubtful
        return None

    def _compare_pending(self, key: str, there: dict[int, m.Pending]) -> None:
        """The same versions are on their way, by the same participants, and the same is missing."""
        assert set(there) == set(self.pending[key])
        for version, puts in self.pending[key].items():
            state = there[version]
            assert set(state.committed) == {who for who, put in puts.items() if put.committed}
            assert set(state.writing) == {who for who, put in puts.items() if not put.committed}
            missing = uncovered(list(puts.values()))
            assert {name for name, _, _ in state.missing} == {name or key for name, _ in missing}
            for name, offset, shape in state.missing:
                assert any(
                    (n or key) == name and b.contains(Box(offset, shape)) for n, b in missing
                )

    def is_manifest(self, key: str) -> bool:
        return bool(self.visible[key]) and self._is_dict[key]

    def newest_of(self, name: str) -> int:
        """The newest version of a key, or of an entry; 0 if it has none."""
        key, _, entry = name.partition("/")
        newest = max(self.visible[key], default=0)
        if not newest or (entry and ("paths" not in (there := self.visible[key][newest]))):
            return 0
        return newest if not entry or entry in there else 0


def _is_complete(puts: list[Put]) -> bool:
    """All have put what they were to put."""
    group = puts[0].group
    done = sum(put.committed for put in puts)
    return not uncovered(puts) and (group is None or done == group.participants)


def _is_partial(puts: dict[str, Put]) -> bool:
    return any(put.group is not None and put.group.partial for put in puts.values())
