"""What a participant puts of a state dict, and the put that goes on when its call has returned."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from concurrent import futures
from typing import Any

import msgspec
import torch

from torchstore_core.clients.calls.arguments import check_bools, check_key
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.calls.user_warnings import warn
from torchstore_core.clients.packed.packed import TorchStoreStateDict
from torchstore_core.clients.state_dicts.casting import CastPlan, Casts
from torchstore_core.clients.state_dicts.ties import PLAIN, Ties, shared
from torchstore_core.clients.transfer.columns.sources import (
    TensorColumns,
    are_names,
    tensor_columns,
)
from torchstore_core.clients.transfer.puts import Putting
from torchstore_core.clients.transfer.sources import (
    Source,
    plain_source,
    prepare,
    prepare_tensor,
)
from torchstore_core.clients.values import nesting
from torchstore_core.clients.values.plain import look
from torchstore_core.clients.values.sharding import (
    TensorShard,
    is_distributed,
    outline,
    ranks_of,
    takes_part,
    this_rank,
)
from torchstore_core.clients.values.tensors import dtype_name
from torchstore_core.errors import (
    ConfigurationError,
    LayoutMismatchError,
    StoreClosedError,
    UnsafeObjectError,
    UnsupportedValueError,
)
from torchstore_core.values import ObjectRef, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

log = logging.getLogger(__name__)


class PendingPut:
    """A put of a state dict that is still committing, but whose values may be changed again.

    Awaiting it, on any event loop, returns the ``ObjectRef``, or raises the error of the commit. If
    it is never awaited, it still commits, also when the event loop or the process ends first; an
    error is logged, if there is anybody left to hear of it.
    """

    def __init__(self, key: str, putting: Putting | None) -> None:
        self.key = key
        self._ref: ObjectRef | None = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[ObjectRef] | None = None
        self._clock: Clock | None = None
        if putting is not None:
            self._clock = putting.clock
            putting.begin_commit()
            self._task = asyncio.create_task(self._commit(putting))
            # Not inside the task: a task that is cancelled before it starts would undo nothing.
            self._task.add_done_callback(putting.__exit__)
            putting.undo_with(self._task)
            putting.clock.outlives_call = True
            self._task.add_done_callback(functools.partial(self._ended, putting.clock))

    @classmethod
    def finished(cls, ref: ObjectRef) -> PendingPut:
        """A put that is already complete."""
        made = cls(ref.key, None)
        made._ref = ref
        return made

    def __repr__(self) -> str:
        return f"<PendingPut of {self.key!r}, {'done' if self.done() else 'committing'}>"

    def done(self) -> bool:
        """Whether the commit has ended, successfully or not."""
        return self._task is None or self._task.done()

    def __await__(self) -> Generator[Any, None, ObjectRef]:
        return self._result().__await__()

    async def _result(self) -> ObjectRef:
        task, clock = self._task, self._clock
        if task is not None:
            if task.get_loop() is asyncio.get_running_loop():
                return await asyncio.shield(task)
            if clock is not None:  # a loop that no longer runs would not end the commit in time
                await clock.within(asyncio.wrap_future(self._over(task)))
                if task.cancelled():
                    raise self._cancelled()
                return task.result()
        if self._error is not None:
            raise self._error
        if self._ref is None:
            raise ConfigurationError("a PendingPut is made by put_state_dict(blocking=False)")
        return self._ref

    def _over(self, task: asyncio.Task[ObjectRef]) -> futures.Future[None]:
        """A future for other event loops, which is done when the task is."""
        over: futures.Future[None] = futures.Future()

        def tell(task: asyncio.Task[ObjectRef]) -> None:
            if over.set_running_or_notify_cancel():
                over.set_result(None)

        try:
            task.get_loop().call_soon_threadsafe(task.add_done_callback, tell)
        except RuntimeError as error:  # the loop is closed
            if not task.done():
                raise self._cancelled() from error
            tell(task)
        return over

    def _cancelled(self) -> StoreClosedError:
        return self._unheard("the event loop of the put ended")

    def _unheard(self, why: str) -> StoreClosedError:
        return StoreClosedError(
            f"{why}; the server had not said yet whether {self.key!r} has committed", key=self.key
        )

    async def _commit(self, putting: Putting) -> ObjectRef:
        try:
            refs = await putting.end_commit()
        except StoreClosedError as error:
            raise self._unheard(str(error)) from error
        (ref,) = putting.refs([self.key], refs)
        putting.clock.put((self.key,), ref.version)
        return ref

    def _ended(self, clock: Clock, task: asyncio.Task[ObjectRef]) -> None:
        if task.cancelled():
            self._error = self._cancelled()
            clock.end(asyncio.CancelledError())
        elif (error := task.exception()) is None:
            self._ref = task.result()
            clock.end(None)
        else:
            self._error = error
            clock.end(error)
            log.warning("a put_state_dict of %r with blocking=False failed: %s", self.key, error)
        # Last, for other threads. The task refers to its event loop, which may never be closed.
        self._task = self._clock = None


def plan_put(
    state_dict: Any,
    key: str,
    *,
    participants: int | None = None,
    participant: str | int | None = None,
    transfer_dtype: Casts = None,
    partial: bool = False,
    keep: int | None = None,
    anonymous: str,
    allow_pickle: bool,
) -> tuple[Sequence[Source] | TensorColumns, m.Publication | None]:
    """Inspect every entry once. Returns the sources to store and the publication that they belong
    to; None instead of a publication if this rank is in no mesh of its DTensors.

    Args:
        anonymous: how to identify this process if it has no rank.

    Raises:
        ConfigurationError, UnsupportedValueError, LayoutMismatchError, UnsafeObjectError
    """
    for name, number in (("participants", participants), ("keep", keep)):
        if number is not None and (type(number) is not int or not 0 < number < 1 << 31):
            raise ConfigurationError(f"{name} is an int above 0, not {number!r}")
    check_bools(partial=partial)
    if participant is not None and not (
        type(participant) is int or (isinstance(participant, str) and len(participant) <= 256)
    ):
        raise ConfigurationError(
            f"participant is an int, or a str of at most 256 characters, not {participant!r}"
        )
    if transfer_dtype is None and (participants or 1) == 1:
        together = _columns(key, state_dict)
        if together is not None:
            return together, m.Publication(key, "", 1, partial, keep or 0, False)
    packed = state_dict if isinstance(state_dict, TorchStoreStateDict) else None
    leaves = nesting.flatten(key, state_dict) if packed is None else packed.leaves()
    ranks: frozenset[int] = frozenset()
    outside = False
    places: dict[tuple[int, ...], tuple[int, ...]] = {}  # of TensorShards: coordinates by mesh
    ties = Ties()
    sources: list[Source] = []
    casts = CastPlan(transfer_dtype)
    values = [leaf.value if transfer_dtype is None else None for leaf in leaves]
    looked = look(values, memory=False)
    tied = shared(looked.addresses)
    columns = zip(leaves, looked.metas, looked.sizes, looked.addresses, strict=True)
    for leaf, looks_like, nbytes, address in columns:
        name, path, value = leaf.name, leaf.path, leaf.value
        fits = len(key) + 1 + len(name) <= m.MAX_KEY
        if looks_like is not None and address not in tied and fits:
            sources.append(plain_source(name, looks_like, nbytes, value, path))
            continue
        plain = type(value) in PLAIN
        if not plain and is_distributed(value):
            outside = not takes_part(value) and (outside or not ranks)
            ranks |= ranks_of(value)
        elif (
            not plain
            and isinstance(value, TensorShard)
            and isinstance(value.tensor_slice, TensorSlice)
        ):
            part = value.tensor_slice
            places[tuple(part.mesh_shape)] = tuple(part.coordinates)
        if not fits:
            raise UnsupportedValueError(
                f"{key!r}: the name of an entry is too long: {len(name)} characters; with the key "
                f"and a slash it may have {m.MAX_KEY}",
                key=key,
            )
        dtype = casts.of(name)
        first = ties.find(value, len(sources))
        if first is not None and sources[first].meta == _meta_with(value, dtype):
            meta = sources[first].meta
            sources.append(Source(name, meta, 0, None, b"", None, path, first))
            continue
        try:
            if plain and dtype is None:
                sources.append(prepare_tensor(check_key(name), value, path))
                continue
            made = prepare(name, value, allow_pickle=allow_pickle, dtype=dtype)
        except (UnsupportedValueError, LayoutMismatchError, UnsafeObjectError) as error:
            text = f"state dict {key!r}: {error.message}"
            raise type(error)(text, key=f"{key}/{name}") from error
        if path:
            made = [msgspec.structs.replace(source, path=path) for source in made]
        sources.extend(made)
    if packed is not None:
        participants = participants or packed.participants
        participant = packed.participant or None if participant is None else participant
    if participants is None:
        if outside:
            return [], None
        participants = len(ranks) or max([math.prod(mesh) for mesh in places], default=1)
    if participants == 1 and not partial:
        _check_alone(key, sources)
        if casts.unused and leaves:
            patterns = ", ".join(casts.unused)
            warn(
                f"{key!r}: no entry matches a pattern of transfer_dtype ({patterns}), so all are "
                f"stored in their own dtypes; the first entry is {leaves[0].name!r}"
            )
    name = ""  # a single participant needs no name: every put makes the next version
    if participants > 1:
        name = str(participant) if participant is not None else this_rank()
        mesh = max(places, key=math.prod, default=())
        name = name or ",".join(map(str, places.get(mesh, ())))
        name = name or f"{anonymous} {_digest(sources)}"
    group = m.Publication(key, name, participants, partial, keep or 0, packed is not None)
    return sources, group


def _columns(key: str, state_dict: Any) -> TensorColumns | None:
    """A flat state dict of many plain tensors, each with memory of its own; None if it is not."""
    if not isinstance(state_dict, Mapping) or not are_names(state_dict, m.MAX_KEY - len(key) - 1):
        return None
    columns = tensor_columns(state_dict, state_dict.values())
    if columns is None or shared(columns.addresses):
        return None
    return columns


def _check_alone(key: str, sources: Sequence[Source]) -> None:
    """Check that a sole participant puts every tensor as a whole."""
    for source in sources:
        part = source.part
        if part is not None and tuple(part.local_shape) != tuple(part.global_shape):
            if sum(s.nbytes for s in sources if s.key == source.key) >= _global_nbytes(source):
                continue
            raise ConfigurationError(
                f"{key!r}: {source.key!r} is a shard, {list(part.local_shape)} of "
                f"{list(part.global_shape)}, and nobody else would put the rest; say how many put "
                "this state dict (participants=), or give its TensorSlice a mesh_shape"
            )


def _global_nbytes(source: Source) -> int:
    part, tensor = source.part, source.tensor
    if part is None or tensor is None:
        return source.nbytes
    itemsize = (source.cast or tensor.dtype).itemsize
    return math.prod(part.global_shape) * itemsize


def _digest(sources: Sequence[Source]) -> str:
    """A digest that distinguishes participants without a rank by their entries and shards."""
    places = ((s.key, "" if s.part is None else s.part.offsets) for s in sources)
    names = "\0".join(f"{name} {place}" for name, place in places)
    return hashlib.sha1(names.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:8]


def _meta_with(value: Any, dtype: torch.dtype | None) -> TensorMeta:
    """The metadata with which the entry would be stored."""
    own, shape = outline(value)
    if dtype is None or not own.is_floating_point:
        dtype = own
    return TensorMeta(dtype_name(dtype), shape)
