"""Between the flat names of ``torch.distributed.checkpoint`` and the entries of a snapshot.

Both flatten nested state dicts, but not in the same way: a list of dicts without tensors, as an
optimizer's ``param_groups``, is one entry of a snapshot and many of a checkpoint. So the nested
state dict is rebuilt, with placeholders for tensors, and flattened again by the other one's rules.
What one of them saved then has the names that the other one looks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import decode_object, encode_object
from torchstore_core.errors import LayoutMismatchError
from torchstore_core.values import ObjectMeta
from torchstore_snapshot.format.manifest import Checkpoint, Entries, Entry, ObjectEntry, TensorEntry

__all__ = [
    "Steps",
    "Stored",
    "Unfolded",
    "divided",
    "fold",
    "holds_stored",
    "top_key",
    "unfold",
]

#: Where a value is in a nested state dict: keys of dicts, and indices of lists.
Steps = tuple[str | int, ...]
_TOP = "state_dict"


def fold(
    entries: Mapping[str, Entry], places: Mapping[str, Steps] | None, key: str | None
) -> tuple[Entries, Checkpoint]:
    """Divide the entries of a checkpoint into state dicts, as ``Snapshot.take`` would have it.

    Args:
        entries: by their flat names.
        places: where each of them is in the nested state dict; None if it was not flattened.
        key: the key that everything gets; None: every dict at the top has its own name as key, and
            what else is there gets a key that none of them has.

    Raises:
        UnsupportedValueError: two entries would have one name.
    """
    if places is None:
        key = key or _TOP
        return {key: dict(entries)}, Checkpoint(key, flat=True)
    top = top_key(entries, places, key)
    table: dict[int, Entry] = {}
    kept: list[torch.Tensor] = []
    nested: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        steps = places.get(name, (name,))
        value: Any
        if isinstance(entry, ObjectEntry) and entry.codec == "msgpack" and entry.piece is None:
            value = decode_object(name, ObjectMeta(entry.codec), entry.data, allow_pickle=False)
        else:
            value = torch.empty(0)
            kept.append(value)
            table[id(value)] = entry
        own, inner = divided(steps, key, top)
        set_element(nested.setdefault(own, {}), inner, value)
    made: Entries = {}
    for own, state in nested.items():
        made[own] = {}
        for leaf in nesting.flatten(own, state, unnamed=True):
            found = table.get(id(leaf.value))
            if found is None:
                meta, data = encode_object(leaf.name, leaf.value, allow_pickle=False)
                found = ObjectEntry(meta.codec, data)
            made[own][leaf.name] = _at(found, leaf.path)
    return made, Checkpoint(top)


def top_key(names: Iterable[str], places: Mapping[str, Steps] | None, key: str | None) -> str:
    """Return the key for what is at the top of a state dict: ``key``, or one that is not in use."""
    top = key or _TOP
    if key is None and places is not None:
        steps = (places.get(name, (name,)) for name in names)
        keys = {own[0] for own in steps if len(own) > 1 and isinstance(own[1], str)}
        while top in keys:
            top += "_"
    return top


def divided(steps: Steps, key: str | None, top: str) -> tuple[str, Steps]:
    """Return the key that an entry gets, and where it is in the state dict of that key."""
    if key is None and len(steps) > 1 and isinstance(steps[1], str):
        return str(steps[0]), steps[1:]
    return top, steps


def _at(entry: Entry, steps: bytes) -> Entry:
    if isinstance(entry, TensorEntry):
        return TensorEntry(entry.dtype, entry.shape, entry.pieces, steps)
    return ObjectEntry(entry.codec, entry.data, entry.piece, steps)


class Stored(torch.Tensor):
    """Stands for a value that is not loaded: a tensor, or an object that may not be unpickled.

    Attributes:
        path: of the value in the snapshot: ``"key/name"``.
        entry: what the manifest says of it.
    """

    path: str
    entry: Any

    @staticmethod
    def of(path: str, entry: Any) -> Stored:
        made = torch.empty(0).as_subclass(Stored)
        made.path, made.entry = path, entry
        return made


class Unfolded(NamedTuple):
    """A state dict as ``torch.distributed.checkpoint`` flattens it.

    Args:
        values: by flat name: an object, or a :class:`Stored`; or a tuple with some in it.
        places: where each of them is in the nested state dict; None if it was not flattened.
    """

    values: dict[str, Any]
    places: dict[str, Steps] | None


def unfold(
    states: Mapping[str, Sequence[tuple[str, bytes, Any]]],
    checkpoint: Checkpoint | None,
    url: str,
) -> Unfolded:
    """Combine the state dicts of a snapshot into one, and flatten it.

    Args:
        states: by key, the names, the encoded steps and the values of its entries.
        checkpoint: how the snapshot was divided; None if ``Snapshot.take`` took it.
        url: of the snapshot, for errors.

    Raises:
        LayoutMismatchError: two entries would have one name.
    """
    if checkpoint is not None and checkpoint.flat:
        return Unfolded({name: v for state in states.values() for name, _, v in state}, None)
    root: dict[str, Any] = {}
    for key, state in states.items():
        nested = nesting.unflatten(key, iter(state))
        own = nested if checkpoint is not None and checkpoint.top == key else {key: nested}
        for name, value in own.items():
            if name in root:
                raise _ambiguous(url, str(name))
            root[name] = value
    try:
        flat, places = flatten_state_dict(root)
    except ValueError as error:
        raise _ambiguous(url, str(error)) from error
    return Unfolded(flat, places)


def _ambiguous(url: str, what: str) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"two entries of the snapshot {url!r} would have one name in a flat state dict ({what}); "
        "read one key at a time: key=",
        details={"path": url},
    )


def holds_stored(value: Any) -> bool:
    """Whether a value is a container with a :class:`Stored` in it."""
    if isinstance(value, Mapping):
        return any(isinstance(v, Stored) or holds_stored(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(v, Stored) or holds_stored(v) for v in value)
    return False
