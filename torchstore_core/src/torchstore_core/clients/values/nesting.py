"""Flattening nested state dicts into named entries, and rebuilding them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import torch

from torchstore_core.clients.values.sharding import TensorShard, is_sharded
from torchstore_core.errors import LayoutMismatchError, ProtocolError, UnsupportedValueError

_MAX_DEPTH = 64
# Every path has its own name, so a container that is in two places yields two sets of entries, and
# that doubles with every level. This is the limit for the entries that result from such repetition.
_MAX_AGAIN = 1 << 16
_LIST, _TUPLE = 0, 1
# One step into a nested value: the key of a dict, or the kind of a sequence and an index in it.
Step = str | int | tuple[int, int]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Step])


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One entry: its name, its encoded path (empty if that is just the name), and its value."""

    name: str
    path: bytes
    value: Any


def _instead(given: Any) -> str:
    """Return what to give instead of what is no state dict, if that can be told."""
    if isinstance(given, torch.nn.Module | torch.optim.Optimizer):
        return "; give its state_dict()"
    return "; give dict() of it" if isinstance(given, Iterator) else ""


def flatten(key: str, state_dict: Any, *, unnamed: bool = False) -> list[Leaf]:
    """Every entry of a state dict, in order.

    Dicts are flattened. Lists and tuples are flattened only if they contain tensors; otherwise they
    are a single value, like everything else. Names are the keys and indices, joined with dots.

    Args:
        unnamed: whether the name of one may be empty, which is the last part of no key of a store.

    Raises:
        UnsupportedValueError: not a dict, two entries with the same name, a key that is neither str
            nor int, a container that contains itself, or too many entries because containers are in
            several places.

    >>> [leaf.name for leaf in flatten("k", {"a": {"w": 1}, "b": [torch.zeros(1)], "c": [2]})]
    ['a.w', 'b.0', 'c']
    """
    if not isinstance(state_dict, Mapping):
        raise UnsupportedValueError(
            f"{key!r}: a state dict is a dict of names, not a {type(state_dict).__qualname__}"
            f"{_instead(state_dict)}",
            key=key,
        )
    leaves: list[Leaf] = []
    known = _Known()
    known.around[id(state_dict)] = ()
    direct = 0
    for name, value in state_dict.items():
        if type(name) is str and type(value) in _LEAVES:  # the usual case, very often
            leaves.append(Leaf(name, b"", value))
            direct += 1
        else:
            leaves.extend(_leaves(key, value, (_step(key, name, ()),), known))
    if direct == len(leaves) and (unnamed or "" not in state_dict):  # the keys of a dict are unique
        return leaves
    names = {leaf.name for leaf in leaves}
    if len(names) < len(leaves):
        twice = Counter(leaf.name for leaf in leaves).most_common(1)[0][0]
        raise UnsupportedValueError(f"{key!r}: two entries are named {twice!r}", key=key)
    if "" in names and not unnamed:
        raise UnsupportedValueError(f"{key!r}: an entry's name is empty", key=key)
    return leaves


_LEAVES = (torch.Tensor, torch.nn.Parameter, TensorShard)


class _Known:
    """Containers that were inspected, once each, and whether they are flattened. (Keeping them
    alive keeps their ids from being reused.)

    Attributes:
        around: where the containers are, by their id(), that the present one is in.
    """

    def __init__(self) -> None:
        self.around: dict[int, tuple[Step, ...]] = {}
        self._followed: dict[int, tuple[object, bool]] = {}
        self._again = 0

    def follows(self, key: str, value: Any) -> bool:
        found = self._followed.get(id(value))
        if found is None:
            follows = _has_names(value) or _holds_tensors(value, set(), 0)
            self._followed[id(value)] = value, follows
            return follows
        if found[1]:
            self._again += len(value)
            if self._again > _MAX_AGAIN:
                raise UnsupportedValueError(
                    f"{key!r}: the same dicts, lists or tuples are in it in so many places that "
                    f"they make more than {_MAX_AGAIN} entries; give each of them once",
                    key=key,
                )
        return found[1]


def _leaves(key: str, value: Any, path: tuple[Step, ...], known: _Known) -> Iterator[Leaf]:
    if len(path) > _MAX_DEPTH:
        raise UnsupportedValueError(f"{key!r}: nested deeper than {_MAX_DEPTH}", key=key)
    steps: Sequence[tuple[Step, Any]] | None = None
    if is_sharded(value):
        pass  # even if it is a list
    elif isinstance(value, Mapping):
        if known.follows(key, value):
            steps = [(_step(key, k, path), inner) for k, inner in value.items()]
        elif not value:
            value = {}  # of whichever type: one with entries is a plain dict, too
    elif isinstance(value, list | tuple) and known.follows(key, value):
        kind = _LIST if isinstance(value, list) else _TUPLE
        steps = [((kind, i), inner) for i, inner in enumerate(value)]
    if steps is None:
        name = _joined(path)
        plain = len(path) == 1 and type(path[0]) is str
        try:
            encoded = b"" if plain else _encoder.encode(path)
        except (UnicodeEncodeError, OverflowError) as error:
            raise UnsupportedValueError(f"{key!r}: the name {name!r}: {error}", key=key) from error
        yield Leaf(name, encoded, value)
        return
    if (outer := known.around.get(id(value))) is not None:
        where = f"what is at {_joined(outer)!r}" if outer else "the state dict"
        raise UnsupportedValueError(
            f"{key!r}: {where} contains itself, at {_joined(path)!r}: a state dict is a tree of "
            "names; leave that reference out",
            key=key,
        )
    known.around[id(value)] = path
    for step, inner in steps:
        yield from _leaves(key, inner, (*path, step), known)
    del known.around[id(value)]


def _has_names(value: Any) -> bool:
    """Whether a value is a non-empty dict in which all keys are valid names."""
    if not isinstance(value, Mapping):
        return False
    for name in value:  # a loop is faster than all() with a generator, and there may be many
        if type(name) is not str and type(name) is not int:
            return False
    return len(value) > 0


def _step(key: str, name: object, path: tuple[Step, ...]) -> Step:
    if isinstance(name, str):
        return str.__str__(name)  # the value of an enum member, not its representation
    if type(name) is int:
        return name
    where = f" in {_joined(path)!r}" if path else ""
    raise UnsupportedValueError(
        f"{key!r}: the names of entries{where} are str or int, and {name!r} is of the type "
        f"{type(name).__qualname__}",
        key=key,
    )


def _joined(path: Sequence[Step]) -> str:
    """Return the name of what is at a path."""
    return ".".join(str(s[1]) if isinstance(s, tuple) else str(s) for s in path)


def _holds_tensors(value: Any, seen: set[int], depth: int) -> bool:
    """Whether a value contains tensors. Containers in ``seen`` have none, or are being searched."""
    if isinstance(value, torch.Tensor | TensorShard):
        return True
    if not isinstance(value, Mapping | list | tuple) or depth > _MAX_DEPTH or id(value) in seen:
        return False
    seen.add(id(value))
    inner = value.values() if isinstance(value, Mapping) else value
    return any(_holds_tensors(v, seen, depth + 1) for v in inner)


def unflatten(key: str, entries: Iterator[tuple[str, bytes, Any]]) -> dict[str, Any]:
    """Rebuild the nested dict that ``(name, path, value)`` entries were flattened from.

    The entries may come from several participants, and from partial puts: if a container is empty
    in one of them, the entries that others have in it take precedence.

    Raises:
        LayoutMismatchError: entries contradict each other.
        ProtocolError: a path is malformed.
    """
    root = _Node(None)
    for name, path, value in entries:
        steps = _decoded(key, name, path)
        node = root
        for step, after in pairwise(steps):
            kind = after[0] if isinstance(after, tuple) else None
            at = _place(step)
            if at not in node or is_empty(node[at]):
                node[at] = _Node(kind)
            node = node[at]
            if type(node) is not _Node or node.kind != kind:
                raise _contradiction(key, name)
        last = _place(steps[-1]) if steps else name
        if last not in node:
            node[last] = value
        elif not (is_empty(value) and type(node[last]) is _Node):
            raise _contradiction(key, name)
    return {name: _built(value) for name, value in root.items()}


def places(key: str, name: str, path: bytes) -> tuple[str | int, ...]:
    """Return the keys and indices on the way to an entry.

    Raises:
        ProtocolError: its path is malformed.
    """
    return tuple(_place(step) for step in _decoded(key, name, path)) or (name,)


def _decoded(key: str, name: str, path: bytes) -> list[Step]:
    try:
        steps = _decoder.decode(path) if path else []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{key!r}: the path of {name!r} is unreadable", key=key) from error
    if len(steps) > _MAX_DEPTH:
        raise ProtocolError(f"{key!r}: {name!r} is nested deeper than {_MAX_DEPTH}", key=key)
    return steps


def is_empty(value: Any) -> bool:
    """Whether a value is a dict, list or tuple without entries."""
    return type(value) in (dict, list, tuple) and not value


def _contradiction(key: str, name: str) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"{key!r}: {name!r} and another entry, of another put, cannot be in one nested dict (one "
        f"lies inside of the other, or in another kind of container); get them one by one as "
        f"{key + '/' + name!r}, or put the whole state dict again",
        key=key,
    )


class _Node(dict[Any, Any]):
    """A container under construction, as opposed to a value. ``kind`` is None unless a sequence."""

    def __init__(self, kind: int | None) -> None:
        self.kind = kind


def _place(step: Step) -> str | int:
    return step[1] if isinstance(step, tuple) else step


def _built(value: Any) -> Any:
    if type(value) is not _Node:
        return value
    if value.kind is None:
        return {name: _built(inner) for name, inner in value.items()}
    members = [_built(value[i]) for i in sorted(value)]
    return members if value.kind == _LIST else tuple(members)


def replace(state_dict: Any, leaves: Sequence[Leaf], new: Callable[[str, Any], Any]) -> Any:
    """Replace the value of every leaf by ``new(name, value)``. Containers stay the same objects,
    except for immutable ones. ``leaves`` are those that :func:`flatten` returned.
    """
    changes = _Node(None)
    for leaf in leaves:
        value = new(leaf.name, leaf.value)
        if value is leaf.value:
            continue
        steps = _decoder.decode(leaf.path) if leaf.path else [leaf.name]
        node = changes
        for step in steps[:-1]:
            node = node.setdefault(_place(step), _Node(None))
        node[_place(steps[-1])] = value
    return _replaced(state_dict, changes)


def _replaced(value: Any, changes: _Node) -> Any:
    made = {
        at: _replaced(value[at], change) if type(change) is _Node else change
        for at, change in changes.items()
    }
    made = {at: new for at, new in made.items() if new is not value[at]}
    if not made:
        return value
    if isinstance(value, MutableMapping | list):
        for at, new in made.items():
            value[at] = new
        return value
    if isinstance(value, Mapping):
        return {**value, **made}
    members = [made.get(at, old) for at, old in enumerate(value)]
    return value._make(members) if hasattr(value, "_make") else tuple(members)
