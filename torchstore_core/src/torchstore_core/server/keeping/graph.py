"""Objects that refer to each other as bytes, and back: what a server's state consists of.

Only classes of this package, plain containers and plain data are known, and an object to which two
others refer is one again. Values are many, so they are columns of fields: a million are written, or
made again, in about a second.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from torchstore_core.boxes import Box
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import ProtocolError
from torchstore_core.server.index.records import Value
from torchstore_core.values import ValueMeta

_ROOT = "torchstore_core."
_CHUNK = 1 << 16
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_DICT, _LIST, _SET, _TUPLE, _STRUCT, _NAMED = range(6)


class _Columns(msgspec.Struct, array_like=True):
    """Values, by the names of their fields. ``metas`` and ``creators`` are what ``meta`` and
    ``creator`` count in; ``box`` and ``more`` are there for some of them alone.
    """

    metas: list[ValueMeta]
    creators: list[ClientFacts]
    key: list[str]
    meta: list[int]
    nbytes: list[int]
    volume: list[int]
    data: list[bytes | None]
    offset: list[int]
    creator: list[int]
    version: list[int]
    created: list[float]
    pins: list[int]
    uses: list[int]
    box: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    more: dict[int, tuple[tuple[int, int], ...]]


_encode = msgspec.msgpack.Encoder().encode
_decode_columns = msgspec.msgpack.Decoder(_Columns).decode
_decode_nodes = msgspec.msgpack.Decoder(list[list[Any]]).decode


class Writer:
    """Turns objects into bytes. A reference is ``[i]``: node ``i``; below zero, value ``~i``."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # so that no id() is used twice
        self._left: deque[object] = deque()
        self._nodes: list[list[Any]] = []
        self._values: list[Value] = []
        self._classes: dict[type, str] = {}

    def number(self, values: Sequence[Value]) -> None:
        """Make these the first values."""
        self._values += values
        self._numbers.update([(id(value), ~at) for at, value in enumerate(values)])

    def write(self, root: object) -> Iterator[tuple[bool, bytes]]:
        """The values in chunks, and at last everything else: whether it is that, and the bytes."""
        self._refer(root)
        while self._left:
            self._nodes.append(self._node(self._left.popleft()))
        for start in range(0, len(self._values), _CHUNK):
            yield False, _encode(_columns(self._values[start : start + _CHUNK]))
        yield True, _encode(self._nodes)

    def _refer(self, child: object) -> Any:
        if type(child) in _PLAIN:
            return child
        number = self._numbers.get(id(child))
        if number is None:
            if type(child) is Value:
                number = ~len(self._values)
                self._values.append(child)
            else:
                number = len(self._alive)
                self._alive.append(child)
                self._left.append(child)
            self._numbers[id(child)] = number
        return [number]

    def _node(self, one: Any) -> list[Any]:
        refer = self._refer
        kind = type(one)
        if kind is dict:
            return [_DICT, *[refer(x) for pair in one.items() for x in pair]]
        if kind is list:
            return [_LIST, *map(refer, one)]
        if kind is set:
            return [_SET, *map(refer, one)]
        if kind is tuple:
            return [_TUPLE, *map(refer, one)]
        name = self._classes.get(kind)
        if name is None:
            name = self._classes[kind] = f"{kind.__module__}:{kind.__qualname__}"
            if not name.startswith(_ROOT):
                raise ProtocolError(f"a {name} is no part of the state of a server")
        if isinstance(one, msgspec.Struct):
            return [_STRUCT, name, *[refer(getattr(one, at)) for at in one.__struct_fields__]]
        if isinstance(one, tuple):
            return [_NAMED, name, *map(refer, one)]
        raise ProtocolError(f"a {name} is no part of the state of a server")


def _columns(values: Sequence[Value]) -> _Columns:
    metas: dict[ValueMeta, int] = {}
    creators: dict[ClientFacts, int] = {}
    return _Columns(
        key=[v.key for v in values],
        meta=[metas.setdefault(v.meta, len(metas)) for v in values],
        nbytes=[v.nbytes for v in values],
        volume=[v.volume for v in values],
        data=[v.data for v in values],
        offset=[v.offset for v in values],
        creator=[creators.setdefault(v.creator, len(creators)) for v in values],
        version=[v.version for v in values],
        created=[v.created for v in values],
        pins=[v.pins for v in values],
        uses=[v.uses for v in values],
        box={at: v.box for at, v in enumerate(values) if v.box is not None},
        more={at: v.more for at, v in enumerate(values) if v.more},
        metas=list(metas),
        creators=list(creators),
    )


class Reader:
    """Makes the objects again."""

    def __init__(self) -> None:
        #: All values that were added, in the order in which they were written.
        self.values: list[Value] = []
        self._nodes: list[list[Any]] = []
        self._made: list[Any] = []
        self._classes: dict[str, type] = {}

    def add_values(self, body: bytes) -> None:
        """Take a chunk of values."""
        some = _decode_columns(body)
        made = list(
            map(
                Value,
                some.key,
                map(some.metas.__getitem__, some.meta),
                some.nbytes,
                some.volume,
                some.data,
                some.offset,
                map(some.creators.__getitem__, some.creator),
                some.version,
                some.created,
                some.pins,
                some.uses,
            )
        )
        for at, box in some.box.items():
            made[at].box = Box(*box)
        for at, more in some.more.items():
            made[at].more = more
        self.values += made

    def read(self, body: bytes) -> Any:
        """Everything else, and with it the root."""
        self._nodes = _decode_nodes(body)
        self._made = [_UNMADE] * len(self._nodes)
        for at, node in enumerate(self._nodes):
            self._begin(at, node)
        for at, node in enumerate(self._nodes):
            self._fill(self._made[at], node)
        return self._made[0]

    def _begin(self, at: int, node: list[Any]) -> None:
        """Make what others may refer to before it is complete."""
        match node[0]:
            case 0:
                self._made[at] = {}
            case 1:
                self._made[at] = []
            case 2:
                self._made[at] = set()
            case 4:
                kind: Any = self._class(node[1])
                if not kind.__struct_config__.frozen:
                    self._made[at] = kind(*([None] * (len(node) - 2)))

    def _object(self, child: Any) -> Any:
        if type(child) is not list:
            return child
        number: int = child[0]
        if number < 0:
            return self.values[~number]
        made = self._made[number]
        if made is _UNMADE:  # it cannot change, so nothing that it refers to refers to it but
            # through something that can
            node = self._nodes[number]
            make: Callable[..., Any]
            if node[0] == _TUPLE:
                made = tuple([self._object(x) for x in node[1:]])
            else:
                make = self._class(node[1])
                made = make(*[self._object(x) for x in node[2:]])
            self._made[number] = made
        return made

    def _fill(self, made: Any, node: list[Any]) -> None:
        of = self._object
        match node[0]:
            case 0:
                made.update([(of(node[at]), of(node[at + 1])) for at in range(1, len(node), 2)])
            case 1:
                made.extend([of(x) for x in node[1:]])
            case 2:
                made.update([of(x) for x in node[1:]])
            case 4:
                if made is _UNMADE or type(made).__struct_config__.frozen:
                    return
                for name, child in zip(made.__struct_fields__, node[2:], strict=True):
                    setattr(made, name, of(child))

    def _class(self, name: str) -> type:
        kind = self._classes.get(name)
        if kind is None:
            module, _, path = name.partition(":")
            if not name.startswith(_ROOT):
                raise ProtocolError(f"{name} is no part of the state of a server")
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            kind = self._classes[name] = found
        return kind


_UNMADE: Any = object()
