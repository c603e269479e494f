"""What `test_joint_puts.py` knows of puts: what they bring, and what a version made of them is."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from math import prod
from typing import Any

from msgspec import structs

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.server.records import SessionRecord
from torchstore_core.values import TensorMeta
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
