"""Pure functions that check the items of a put and create the grants for its reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from torchstore_core import boxes
from torchstore_core.boxes import Box
from torchstore_core.errors import ProtocolError
from torchstore_core.server.index.records import Value
from torchstore_core.values import StateDictMeta, TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import ALIGNMENT, spread

# Maximum number of dimensions of a tensor, or of a mesh: more than torch has.
_MAX_DIMS = 64
#: Every value must be smaller than this, in bytes.
MOST_BYTES = 1 << 60


class PutItems(Sequence[m.PutItem]):
    """The items of a put that came in columns. They have been checked as :func:`check_item` does.
    Where there are many, the columns are read: an item is only created when it is asked for.

    Attributes:
        keys, metas, sizes: see ``messages.PutItem``.
    """

    __slots__ = ("keys", "metas", "sizes")

    def __init__(self, columns: m.ItemColumns) -> None:
        self.keys = columns.keys
        of = columns.kind_of()
        sizes = [kind.nbytes for kind in columns.kinds]
        for nbytes in sizes:
            if not 0 < nbytes < MOST_BYTES:
                raise ProtocolError(f"cannot place {nbytes} bytes")
        lengths = set(map(len, self.keys))
        if lengths and (min(lengths) < 1 or max(lengths) > m.MAX_KEY):
            raise _key_error(min(lengths) and max(lengths))
        self.metas: list[TensorMeta] = spread([kind.meta for kind in columns.kinds], of)
        self.sizes = spread(sizes, of)

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> m.PutItem: ...
    @overload
    def __getitem__(self, at: slice) -> list[m.PutItem]: ...
    def __getitem__(self, at: int | slice) -> m.PutItem | list[m.PutItem]:
        if isinstance(at, slice):
            return list(map(m.PutItem, self.keys[at], self.metas[at], self.sizes[at]))
        return m.PutItem(self.keys[at], self.metas[at], self.sizes[at])

    def __iter__(self) -> Iterator[m.PutItem]:
        return map(m.PutItem, self.keys, self.metas, self.sizes)


@overload
def one_by_one(request: m.LocateKeys) -> m.Locate: ...
@overload
def one_by_one(request: m.FetchKeys) -> m.Fetch: ...
def one_by_one(request: m.LocateKeys | m.FetchKeys) -> m.Locate | m.Fetch:
    """Return the request with a want for each of its keys."""
    wants = [*(request.wants or ()), *map(m.Want, request.keys)]
    lease, most, avoid = request.lease, request.inline_max, request.avoid
    if isinstance(request, m.LocateKeys):
        return m.Locate(request.id, lease, wants, most, avoid)
    return m.Fetch(request.id, lease, request.key, request.version, wants, most, avoid)


def check_lent(lent: m.Lent, count: int) -> None:
    """Raise ``ProtocolError`` if references are in items that a put of so many does not have."""
    if not all(0 <= at < count for at, _ in lent):
        raise ProtocolError("references are in items that the put does not have")


def check_key(item: m.PutItem) -> None:
    """Raise ``ProtocolError`` if an item's key is empty or too long."""
    if not 0 < len(item.key) <= m.MAX_KEY:
        raise _key_error(len(item.key))


def _key_error(characters: int) -> ProtocolError:
    return ProtocolError(f"a key has 1 to {m.MAX_KEY} characters, not {characters}")


def check_item(item: m.PutItem) -> None:
    """Check that an item that will be stored is valid and consistent.

    Raises:
        ProtocolError: it is not.
    """
    check_key(item)
    if type(item.meta) is StateDictMeta:
        raise ProtocolError(f"{item.key!r}: a state dict is put by its entries", key=item.key)
    if item.data is not None:
        if len(item.data) != item.nbytes:
            raise ProtocolError(
                f"{item.key!r}: {len(item.data)} bytes came, {item.nbytes} were announced"
            )
    elif not 0 < item.nbytes < MOST_BYTES:
        raise ProtocolError(f"{item.key!r}: cannot place {item.nbytes} bytes", key=item.key)


def unusual(items: Sequence[m.PutItem]) -> list[m.PutItem]:
    """Return the items that are not obviously whole tensors acceptable to :func:`check_item`."""
    return [
        item
        for item in items
        if item.data is not None
        or item.part is not None
        or item.same_as != -1
        or not 0 < item.nbytes < MOST_BYTES
        or not 0 < len(item.key) <= m.MAX_KEY
        or type(item.meta) is not TensorMeta
    ]


def checked_box(item: m.PutItem) -> Box | None:
    """Return the box of an item that is a shard; None if the item is a whole value.

    Raises:
        ProtocolError: the shard does not fit the tensor, or the value is not a tensor.
    """
    part = item.part
    if part is None:
        return None
    meta = item.meta
    if not isinstance(meta, TensorMeta):
        raise ProtocolError(f"{item.key!r}: only a tensor has shards", key=item.key)
    mesh = len(part.mesh_shape)
    if len(part.coordinates) != mesh or max(mesh, len(meta.shape)) > _MAX_DIMS:
        raise ProtocolError(
            f"{item.key!r}: a shard has at most {_MAX_DIMS} dimensions, and as many coordinates as "
            "its mesh",
            key=item.key,
        )
    try:
        box = Box(part.offsets, part.local_shape)
        target = boxes.whole(meta.shape)
        inside = part.global_shape == meta.shape and target.contains(box)
    except ValueError as error:
        raise ProtocolError(f"{item.key!r}: {error}", key=item.key) from error
    if not inside or bool(box.numel) != bool(item.nbytes) or item.nbytes % max(box.numel, 1):
        raise ProtocolError(
            f"{item.key!r}: a shard of {item.nbytes} bytes, {list(box.shape)} at "
            f"{list(box.offset)}, is not one of {list(meta.shape)}",
            key=item.key,
        )
    return None if box == target else box


def packed_grant(values: Sequence[Value], placed: int) -> list[m.Grant | None] | None:
    """Return the only grant of values on one volume, of ``placed`` bytes together, if they lie one
    after the other there; see ``messages.Granted``.
    """
    offsets = [value.offset for value in values]
    if (
        not offsets
        or (offsets[-1] + values[-1].nbytes - offsets[0] + ALIGNMENT - 1) & -ALIGNMENT != placed
    ):
        return None
    if sorted(offsets) != offsets:  # they do not overlap, so these are all the bytes
        return None
    return [m.Grant(values[0].volume, 0, offsets[0])]


def grants_of(values: Sequence[Value | None]) -> list[m.Grant | None]:
    """Return the grants of the places where the values are stored; see ``messages.Granted``."""
    grants = [None if v is None else m.Grant(v.volume, 0, v.offset) for v in values]
    for at in range(max([len(v.more) for v in values if v is not None], default=0)):
        grants += [
            m.Grant(v.more[at][0], 0, v.more[at][1]) if v is not None and at < len(v.more) else None
            for v in values
        ]
    return grants
