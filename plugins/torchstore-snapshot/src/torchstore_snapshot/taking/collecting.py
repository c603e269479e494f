"""What this rank has: every entry of every state dict, inspected once."""

from __future__ import annotations

import contextlib
import fnmatch
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from torchstore_core import boxes
from torchstore_core.clients.state_dicts.ties import Ties
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.codec import encode_object
from torchstore_core.clients.values.sharding import (
    ShardList,
    is_dtensor,
    is_sharded,
    local_parts,
    outline,
)
from torchstore_core.clients.values.tensors import describe, dtype_name, storable
from torchstore_core.errors import UnsafeObjectError, UnsupportedValueError
from torchstore_core.values import ObjectMeta, TensorSlice
from torchstore_snapshot.api.stateful import AppState, RNGState, checked
from torchstore_snapshot.errors import AppStateError
from torchstore_snapshot.garbage import no_collections

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["Item", "LocalPiece", "collect", "collect_values", "matches", "refuse_ambiguous"]
__all__ += ["with_slashes"]


class LocalPiece(NamedTuple):
    """A part of a tensor in the memory of this process.

    Args:
        tensor: a detached strided tensor; its strides and its device are arbitrary.
        slice: its position; None if it is the whole tensor.
    """

    tensor: torch.Tensor
    slice: TensorSlice | None

    @property
    def box(self) -> boxes.Box:
        if self.slice is None:
            return boxes.whole(tuple(self.tensor.shape))
        return boxes.Box(self.slice.offsets, self.slice.local_shape)


class Item(NamedTuple):
    """An entry of a state dict.

    Args:
        key: of the state dict in the application state.
        name: of the entry in the state dict.
        steps: where it is in the nested state dict.
        dtype, shape: of the whole tensor; empty if it is not one.
        pieces: what this rank holds of the tensor.
        codec, data: of a value that is not a tensor.
        common: whether all ranks that have this box have the same values in it.
        mesh: which ranks ``common`` is about, those of a DTensor's mesh: equal for equal ranks.
            Empty if it is about all.
        tied: the index of the earlier item with the same memory; None if there is none.
    """

    key: str
    name: str
    steps: bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()
    pieces: tuple[LocalPiece, ...] = ()
    codec: str = ""
    data: bytes = b""
    common: bool = False
    tied: int | None = None
    mesh: str = ""

    @property
    def is_tensor(self) -> bool:
        return not self.codec


def collect(
    app_state: AppState, replicated: Sequence[str] = (), *, allow_pickle: bool = False
) -> tuple[list[str], list[Item]]:
    """Call ``state_dict()`` of every object and inspect what it returns, without copying.

    Returns:
        The keys of all objects, and all entries.

    Raises:
        UnsafeObjectError: a value needs pickle, which ``allow_pickle`` does not permit.
        UnsupportedValueError, LayoutMismatchError: a value cannot be stored.
        AppStateError: see :func:`~torchstore_snapshot.api.stateful.checked`.
    """
    given: object = replicated
    if not isinstance(given, list | tuple | set | frozenset) or not all(
        isinstance(glob, str) for glob in given
    ):  # each letter of a str would be a glob
        raise AppStateError(f"replicated is a list of globs, such as ['model/*'], not {given!r}")
    rng: tuple[RNGState, dict[str, Any]] | None = None
    states: dict[str, Any] = {}
    common: dict[str, Collection[str] | None] = {}
    for key, stateful in checked(app_state):
        states[key] = stateful.state_dict()
        if isinstance(stateful, RNGState):
            rng = stateful, states[key]
        ignored = _ignored_by_ddp(stateful)
        if ignored is not None:
            common[key] = ignored
    if rng is not None:  # whatever the calls of state_dict() drew
        rng[0].load_state_dict(rng[1])
    with no_collections():
        items = collect_values(states, replicated, common, allow_pickle=allow_pickle)
    refuse_ambiguous(with_slashes(items))
    return sorted(states), items


def collect_values(
    states: dict[str, Any],
    replicated: Sequence[str] = (),
    common: dict[str, Collection[str] | None] | None = None,
    *,
    allow_pickle: bool = False,
    absent: bool = False,
) -> list[Item]:
    """Inspect state dicts, by key.

    Args:
        replicated: globs of the paths (``key/name``) whose values are the same on all ranks.
        common: keys whose tensors are the same on all ranks, with the names of those that are not.
        absent: shards may be on the meta device: somebody fetches them when they are written.
    """
    items: list[Item] = []
    ties = Ties()
    absentees: dict[int, int] = {}  # shards without memory are tied if they are the same object
    for key, state in states.items():
        exceptions = (common or {}).get(key)
        everywhere = common is not None and key in common
        for leaf in nesting.flatten(key, state, unnamed=True):
            path = f"{key}/{leaf.name}"
            if not path.isascii():
                _refuse_surrogates(path)
            shared = (everywhere and leaf.name not in (exceptions or ())) or matches(
                path, replicated
            )
            value = leaf.value
            if not (isinstance(value, torch.Tensor) or is_sharded(value)):
                meta, data = _encoded(path, value, allow_pickle=allow_pickle)
                items.append(
                    Item(key, leaf.name, leaf.path, codec=meta.codec, data=data, common=shared)
                )
                continue
            first = ties.find(value, len(items))
            if absent and first is None and isinstance(value, ShardList):
                known = absentees.setdefault(id(value), len(items))
                first = known if known < len(items) else None
            made = _tensor_item(key, leaf, path, value, shared, absent=absent)
            if first is not None and (made.dtype, made.shape) == items[first][3:5]:
                made = made._replace(tied=first)
            items.append(made)
    return items


def _encoded(path: str, value: Any, *, allow_pickle: bool) -> tuple[ObjectMeta, bytes]:
    """Encode a value that is no tensor. Without pickle, dicts of the standard library are plain
    ones; a restore gives them their types again.

    Raises:
        UnsafeObjectError, UnsupportedValueError: it cannot be encoded.
    """
    try:
        return encode_object(path, value, allow_pickle=allow_pickle)
    except UnsafeObjectError:
        with contextlib.suppress(UnsafeObjectError):
            return encode_object(path, _plain(value, {}), allow_pickle=False)
        raise


def _plain(value: Any, made: dict[int, Any], depth: int = 0) -> Any:
    """The same value with plain dicts. What is in two places, or in itself, still is.

    Args:
        made: what the containers have become that were seen, by their ids.
    """
    kind = type(value)
    if kind not in _CONTAINERS or depth > _MAX_DEPTH:
        return value
    if id(value) not in made:
        made[id(value)] = value  # inside of itself
        if isinstance(value, dict):
            new: Any = {name: _plain(inner, made, depth + 1) for name, inner in value.items()}
        else:
            new = kind(_plain(inner, made, depth + 1) for inner in value)
        made[id(value)] = new
    return made[id(value)]


_CONTAINERS = {dict, Counter, OrderedDict, defaultdict, list, tuple}
# Deeper values are not encoded either.
_MAX_DEPTH = 64


def _refuse_surrogates(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            f"the name {path!r} cannot be stored: it is no valid Unicode ({error.reason})",
            key=ascii(path),
        ) from error


def with_slashes(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Return the keys and names of the entries that have a slash in one of them."""
    return [(item.key, item.name) for item in items if "/" in item.key or "/" in item.name]


def refuse_ambiguous(named: Sequence[tuple[str, str]]) -> None:
    """Raise UnsupportedValueError if two entries, given by key and name, have one path, because
    slashes are part of their names. Others than those :func:`with_slashes` have none in common.
    """
    keys: dict[str, str] = {}
    for key, name in named:
        path = f"{key}/{name}"
        other = keys.setdefault(path, key)
        if other != key:
            raise UnsupportedValueError(
                f"the path {path!r} is that of {path[len(other) + 1 :]!r} in {other!r}, and of "
                f"{name!r} in {key!r}; give one of them another name",
                key=path,
            )


def _tensor_item(
    key: str, leaf: nesting.Leaf, path: str, value: Any, shared: bool, *, absent: bool
) -> Item:
    if not is_sharded(value):
        tensor = storable(path, value)
        meta = describe(tensor)
        piece = LocalPiece(tensor, None)
        return Item(key, leaf.name, leaf.path, meta.dtype, meta.shape, (piece,), common=shared)
    parts = local_parts(path, value)
    dtype, shape = outline(value)
    pieces: list[LocalPiece] = []
    for local, part in parts:
        if 0 in part.local_shape and 0 not in shape:
            continue  # the empty share of an uneven distribution
        plain = TensorSlice(part.offsets, part.local_shape, part.global_shape)
        whole = tuple(part.local_shape) == shape
        tensor = local if absent and local.is_meta else storable(path, local)
        pieces.append(LocalPiece(tensor, None if whole else plain))
    # Tensors of one name on different meshes, as in the stages of a pipeline, are different ones;
    # unless the user says that they are the same.
    mesh = mesh_of(value) if is_dtensor(value) and not shared else ""
    return Item(
        key,
        leaf.name,
        leaf.path,
        dtype_name(dtype),
        shape,
        tuple(pieces),
        common=True,
        mesh=mesh,
    )


def mesh_of(value: DTensor) -> str:
    """Return a text that is equal for DTensors whose meshes have the same ranks; empty if those are
    all ranks of the job.
    """
    return _name_of(value.device_mesh)


@lru_cache(maxsize=64)
def _name_of(mesh: DeviceMesh) -> str:
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == torch.distributed.get_world_size():
        return ""
    return xxhash.xxh3_64_hexdigest(",".join(map(str, ranks)).encode())


def matches(path: str, globs: Sequence[str]) -> bool:
    """Whether a path matches one of the globs; names of nested entries may also be written with
    slashes instead of dots.

    >>> matches("optim/state.0.step", ["optim/state/*"]), matches("model/w", ["optim/**"])
    (True, False)
    """
    if not globs:
        return False
    slashed = path.replace(".", "/")
    return any(fnmatch.fnmatchcase(p, glob) for glob in globs for p in (path, slashed))


def _ignored_by_ddp(stateful: object) -> Collection[str] | None:
    """The names that ``DistributedDataParallel`` does not synchronise; None if it is not one."""
    if not torch.distributed.is_available() or not isinstance(stateful, torch.nn.Module):
        return None
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(stateful, DistributedDataParallel):
        return None
    ignored = set(stateful.parameters_to_ignore)
    return {f"module.{name}" for name in ignored} | ignored
