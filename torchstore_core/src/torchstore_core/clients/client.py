"""The client object: every operation of the store, usable from any event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torchstore_core.clients.calls.arguments import (
    check_bools,
    check_key,
    check_min_version,
    check_version,
    listed,
)
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.calls.incarnations import check_after, refs_of
from torchstore_core.clients.calls.volume_operations import VolumeOperations
from torchstore_core.clients.packed import packed
from torchstore_core.clients.packed.packed import TorchStoreStateDict
from torchstore_core.clients.session.channel import Channel
from torchstore_core.clients.session.held_ref import HeldRef, caller
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.state_dicts import getting
from torchstore_core.clients.state_dicts.putting import PendingPut, plan_put
from torchstore_core.clients.transfer.allocations import allocate, blank
from torchstore_core.clients.transfer.columns.gets import Named, names_and_tensors
from torchstore_core.clients.transfer.columns.sources import (
    TensorColumns,
    keys_of,
    tensor_columns,
)
from torchstore_core.clients.transfer.gets import (
    Found,
    ValueRequest,
    asks_of,
    get_asks,
    get_named,
    requests_of,
)
from torchstore_core.clients.transfer.granting import PutOptions
from torchstore_core.clients.transfer.puts import Putting, put_sources, rides_in_message
from torchstore_core.clients.transfer.sources import Source, look_again, prepare, prepare_all
from torchstore_core.clients.values.differences import StateDictReport
from torchstore_core.clients.values.sharding import TensorShard
from torchstore_core.clients.values.tensors import fake_mode
from torchstore_core.contracts.when_full import when_full_code
from torchstore_core.errors import ConfigurationError, UnsupportedValueError, VersionGoneError
from torchstore_core.values import ObjectRef, Request, StateDictMeta, TensorSlice
from torchstore_core.wire.columns import FEWEST

if TYPE_CHECKING:
    import torch
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    from torchstore_core.clients.state_dicts.put_arguments import PutArguments


class Client(VolumeOperations):
    """A process's handle to one store, returned by ``initialize``, ``connect`` and ``client()``.

    It is safe to use from several event loops and threads, across repeated ``asyncio.run`` calls,
    and in a forked child (which gets connections of its own). Every operation takes ``timeout=``
    (seconds; None: the store's default, as given to ``initialize`` or ``connect``).

    At the end of an ``async with`` block of what ``initialize``, ``initialize_spmd``, ``connect``
    or ``connect_or_initialize`` has returned, the store is shut down, as by ``shutdown``; when
    several such blocks overlap, at the end of the last one. A store that this process had before
    that call, or that ``client()`` has found, stays.

    >>> import asyncio
    >>> import torchstore_core as ts
    >>> async def main():
    ...     async with await ts.initialize(capacity=64 << 20) as store:
    ...         await store.put("step", 7)
    ...         async with await ts.connect(store.address):
    ...             pass  # it was there already
    ...         print(await store.get("step"))
    ...     print(await ts.stores())
    >>> asyncio.run(main())
    7
    []

    Every operation can raise the following, in addition to the errors that it documents itself:

    * ``StoreTimeoutError``: the timeout has expired.
    * ``StoreClosedError``: the server is gone, or the store was shut down in this process.
    * ``UnsupportedValueError``: a key is not a str of 1 to 4096 characters.
    * ``ConfigurationError``: ``timeout`` is not a number of at least 0; infinity means no limit.
    * ``ProtocolError``: too many keys for one message (64 MiB), or keys that are not Unicode.
    """

    # ---- put ------------------------------------------------------------------------------

    async def put(
        self,
        key: str,
        value: Any,
        tensor_slice_spec: TensorSlice | None = None,
        *,
        version: int | None = None,
        rewind: bool = False,
        when_full: str | None = None,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> ObjectRef:
        """Store a value as the next version of ``key``; the value may be changed afterwards.

        Each rank puts its own shard of a DTensor or ShardedTensor. The n-th put of every rank
        contributes to the n-th version, which can be read as soon as its shards cover the tensor,
        and in any other layout. Replicated shards are stored once.

        Args:
            key: 1 to 4096 characters.
            value: a dense tensor of any shape, dtype and strides (CPU or CUDA; stored detached), a
                DTensor, a :class:`TensorShard`, a :class:`TorchStoreStateDict` (stored as by
                ``put_state_dict``), or any other Python object.
            tensor_slice_spec: the slice of a larger tensor that ``value`` is.
            version: the version to create, which must be above the newest; None: the next one.
                Ranks that may restart should pass it, so that they always agree on the step.
            rewind: go back to ``version``, which need not be above the newest: as soon as it is
                whole, that version and every newer one of before are gone. See
                :meth:`put_state_dict`.
            when_full: what is done with the value when memory is full: ``"pinned"``: it stays;
                ``"spillable"``: it is written to disk, and read back by the next get;
                ``"evictable"``: it is dropped, the least recently used value first. None: what the
                store was initialized with. Values that somebody reads, or holds a zero-copy tensor
                of, stay in any case.
            timeout: seconds. A put that finds memory full waits until other values are on disk.
            allow_pickle: False refuses objects that need pickle; None: the client's default.

        Returns:
            The version that the value is, or is part of. A rank outside a DTensor's mesh has
            nothing to put, and gets version 0.

        Raises:
            StoreFullError: the value does not fit; nothing was changed.
            ConfigurationError: ``when_full`` is invalid, or the store has no place to spill to.
            UnsupportedValueError: the value cannot be stored (meta, sparse, ... tensors, a
                DTensor with Partial placements).
            LayoutMismatchError: a shard does not fit its slice or placements.
            VersionGoneError: ``version`` is not above the newest, and ``rewind`` is not set.
            ConfigurationError: ``rewind`` without ``version``.
            UnsafeObjectError: the value needs pickle, which is not allowed.
            TransportUnavailableError: no permitted transport reaches the volume.
            PluginError: the store's strategy names no volume.
        """
        with self._watch("put", timeout, key) as clock:
            if tensor_slice_spec is not None:
                value = TensorShard(value, tensor_slice_spec)
            if isinstance(value, TorchStoreStateDict):
                key = check_key(key)
                how = version, rewind, when_full, allow_pickle
                session, channel, sources, options = await self._plan(key, value, clock, *how)
                return await _publish(session, channel, key, sources, clock, options)
            return (
                await self._put((key,), (value,), version, clock, allow_pickle, rewind, when_full)
            )[0]

    async def put_object(
        self,
        value: Any,
        *,
        when_full: str | None = None,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> HeldRef:
        """Store a value without a key; it lives as long as any process has a reference to it.

        Objects are not listed by ``keys``, and only a reference leads to them.

        Args:
            value: a dense tensor of any shape, dtype and strides (CPU or CUDA; stored detached), or
                any other Python object, as for ``put``.
            when_full: ``"pinned"`` or ``"spillable"``, as for ``put``; None: what the store was
                initialized with. (In a store whose values are ``"evictable"``, objects are pinned:
                what is referred to is not evicted.)
            timeout: seconds.
            allow_pickle: False refuses objects that need pickle; None: the client's default.

        Returns:
            The only reference to it. Send it to other processes, or read it with ``get``.

        Raises:
            StoreFullError: the value does not fit; nothing was changed.
            UnsupportedValueError: the value cannot be stored; or it is put by several processes
                (DTensors, shards) or has entries (packed state dicts), which needs a key: put it,
                and ``hold`` it.
            UnsafeObjectError: the value needs pickle, which is not allowed.
            ConfigurationError: ``when_full`` is invalid, or the store has no place to spill to.
            TransportUnavailableError: no permitted transport reaches the volume.
            PluginError: the store's strategy names no volume.
        """
        with self._watch("put_object", timeout) as clock:
            code = 0 if when_full is None else when_full_code(when_full)
            if when_full == "evictable":
                raise ConfigurationError(
                    "an object without a key is there as long as it is referred to, so it is not "
                    'evicted: when_full is "pinned" or "spillable"'
                )
            pickle_too = self._moves_values(allow_pickle)
            if isinstance(value, TorchStoreStateDict):
                raise UnsupportedValueError(
                    "a packed state dict needs a key: put it with one, and hold that"
                )
            sources = prepare("object", value, allow_pickle=pickle_too)
            if len(sources) != 1 or sources[0].part is not None:
                raise UnsupportedValueError(
                    "a tensor that several processes put in parts needs a key: put it with one, "
                    "and hold that"
                )
            here = self._here(clock)
            if here is None:
                here = await self._join(clock)
                look_again(sources)
            session, channel = here
            with HeldRef.beginning(session.holder) as ref:
                how = PutOptions(when_full=code, held_as=(ref.ident, caller()))
                reply = await put_sources(session, channel, sources, clock, how)
                return ref.refers(ObjectRef("", reply.versions[0], session.welcome.incarnation))

    async def empty(
        self,
        shape: int | Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Make a CPU tensor in the memory of the store, to be filled in place, and put as a whole
        without a copy.

        What ``put`` and ``put_object`` are given is then what readers map: nothing is copied, of
        whatever size. After that, the tensor can still be read; what is written to it remains in
        this process, as with what a zero-copy get returns. Put several times, or in parts, or
        with a ``version``, or in a state dict or batch, it is copied, like any other tensor.

        It is an ordinary tensor in ordinary memory where none is shared with the volume (on another
        host, or with a strategy that makes several copies), and below 1 MB.

        Args:
            shape: as of ``torch.empty``.
            dtype: None: torch's default dtype.
            timeout: seconds.

        Returns:
            An uninitialized, contiguous tensor. Until it is put, its memory counts as that of an
            unfinished put; it is free when the tensor is.

        Raises:
            StoreFullError: the store has no room for it.
            UnsupportedValueError: there is no such tensor, or it cannot be stored.

        Example::

            batch = await ts.empty((4096, 1024), dtype=torch.bfloat16)
            torch.mul(weights, scale, out=batch)
            ref = await ts.put_object(batch)
        """
        with self._watch("empty", timeout) as clock:
            self._moves_values(None)
            like = blank(shape, dtype)
            session, channel = self._here(clock) or await self._join(clock)
            return await allocate(session, channel, like, clock)

    async def put_batch(
        self,
        items: Mapping[str, Any],
        *,
        version: int | None = None,
        rewind: bool = False,
        when_full: str | None = None,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> dict[str, ObjectRef]:
        """Store several values atomically: readers see all of them or none. Raises the same errors
        as ``put``.

        With DTensors, every rank puts the same keys; the put that completes them makes all of them
        visible at once.
        """
        with self._watch("put_batch", timeout) as clock:
            if not isinstance(items, Mapping):
                raise UnsupportedValueError(
                    f"put_batch takes a dict of key to value, not a {type(items).__qualname__}"
                )
            clock.entries = len(items)
            if not items:
                return {}
            clock.key = next(iter(items))
            keys, values = list(items), list(items.values())
            refs = await self._put(keys, values, version, clock, allow_pickle, rewind, when_full)
            return dict(zip(keys, refs, strict=True))

    async def _put(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        version: int | None,
        clock: Clock,
        allow_pickle: bool | None,
        rewind: bool,
        when_full: str | None,
    ) -> list[ObjectRef]:
        """Put values under these keys; returns their refs, in order."""
        pickle_too = self._moves_values(allow_pickle)
        clock.version = exact = check_version(version, rewind=rewind)
        code = 0 if when_full is None else when_full_code(when_full)
        sources: Sequence[Source] | TensorColumns | None = None
        counts: list[int] | None = None
        if len(keys) == 1:  # very often
            sources = prepare(keys[0], values[0], allow_pickle=pickle_too)
            if len(sources) != 1:
                counts = [len(sources)]
        elif len(keys) >= FEWEST:
            sources = tensor_columns(keys, values)
        if sources is None:
            sources, counts = prepare_all(keys, values, allow_pickle=pickle_too)
        refs: list[ObjectRef] = []
        if sources:
            here = self._here(clock)
            if here is None:
                here = await self._join(clock)
                if type(sources) is TensorColumns:
                    sources = sources.sources()
                look_again(sources)
            session, channel = here
            how = PutOptions(exact, None, rewind, code)
            reply = await put_sources(session, channel, sources, clock, how)
            refs = refs_of(keys_of(sources), reply, session.welcome.incarnation)
        if counts is not None:
            each = iter(refs)  # one for each shard
            shards = [[next(each) for _ in range(count)] for count in counts]
            refs = [
                max(found, key=lambda ref: ref.version, default=ObjectRef(key, 0))
                for key, found in zip(keys, shards, strict=True)
            ]
        clock.version = refs[0].version
        if self._joined.renewed is not None:
            clock.put([ref.key for ref in refs], clock.version)
        return refs

    # ---- get ------------------------------------------------------------------------------

    async def get(
        self,
        key_or_ref: str | ObjectRef | HeldRef | Request,
        inplace_tensor: torch.Tensor | TensorShard | ShardedTensor | None = None,
        tensor_slice_spec: TensorSlice | None = None,
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> Any:
        """Get the value of a key, of a state dict, or of one of its entries (``f"{key}/{name}"``).

        On the volume's host, a large tensor is returned without a copy: it is an ordinary writable
        tensor on a private mapping. Writing to it is not visible to anyone else, and its memory is
        not reused while the tensor is alive.

        Args:
            key_or_ref: a key (newest version), an ``ObjectRef`` or a ``HeldRef`` (exactly that
                version) or a ``Request``.
            inplace_tensor: a tensor to fill and return; same shape and dtype, any strides. For a
                DTensor or :class:`TensorShard` only the local piece is fetched, whatever the layout
                that the value was put in.
            tensor_slice_spec: get only this part; ``inplace_tensor`` then has its ``local_shape``.
            timeout: seconds.
            allow_pickle: False refuses pickled objects; None: the client's default.

        Raises:
            KeyNotFoundError: the key does not exist.
            PartialPutError: shards of its first version are still missing (also a KeyError).
            VersionGoneError: the ref's version was overwritten or deleted.
            LayoutMismatchError: the destination or slice does not fit; nothing was written.
            UnsafeObjectError: the value was pickled, which is not allowed.
            UnsupportedValueError: the destination cannot be written to (meta, sparse, ...), or the
                value cannot be rebuilt here.
            TransportUnavailableError: no permitted transport reaches the volume.
        """
        with self._watch("get", timeout) as clock:
            want = ValueRequest.make(key_or_ref, inplace_tensor, tensor_slice_spec)
            return (await self._get([want], clock, allow_pickle))[0]

    async def get_batch(
        self,
        keys: Iterable[str | ObjectRef | HeldRef | Request] | Mapping[str, Any],
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> dict[str, Any]:
        """Get several values as one consistent snapshot, all or nothing.

        Args:
            keys: a list of keys, refs or requests, at most one per key; or a dict that maps keys to
                a destination tensor, a ``TensorSlice``, or None.

        Returns:
            The values by key, in the order of the request; those of objects without a key by their
            reference.

        Raises:
            KeyNotFoundError: ``details["missing"]`` lists all missing keys.
            ConfigurationError: a key is requested twice, at different versions or slices.
            LayoutMismatchError: also if two destinations overlap in memory; they may be the very
                same tensor if the values are the same.
            Everything that ``get`` raises.
        """
        with self._watch("get_batch", timeout) as clock:
            asked = (
                keys
                if isinstance(keys, Mapping | str)
                else listed(keys, "get_batch takes a list of keys or a dict")
            )
            if (named := names_and_tensors(asked)) is not None:
                clock.entries = len(named.keys)
                values = await self._get(named, clock, allow_pickle)
                return dict(zip(named.keys, values, strict=True))
            wants = [*_wants(asked)]
            clock.entries = len(wants)
            if not wants:
                return {}
            names = {want.key for want in wants}
            if len(names) < len(wants):
                _refuse_ambiguous(wants)
            values = await self._get(wants, clock, allow_pickle)
            if "" in names:
                return dict(zip(map(_label, asked), values, strict=True))
            return {want.key: value for want, value in zip(wants, values, strict=True)}

    def _moves_values(self, allow_pickle: bool | None) -> bool:
        """Check that values can be moved here. Returns whether they may be pickled.

        Raises:
            UnsupportedValueError: this is inside of a ``FakeTensorMode``: nothing is read or
                written there, and new tensors have no data.
        """
        if fake_mode() is not None:
            raise UnsupportedValueError(
                "values are neither put nor got inside of a FakeTensorMode, in which tensors have "
                "no data; do it outside of that"
            )
        return self._allow_pickle if allow_pickle is None else self._pickles(allow_pickle)

    async def _get(
        self, wants: Sequence[ValueRequest] | Named, clock: Clock, allow_pickle: bool | None
    ) -> Sequence[Any]:
        pickle_too = self._moves_values(allow_pickle)
        into_own = False
        asked: list[list[ValueRequest]] | None = None  # one each
        if isinstance(wants, Named):
            clock.key = wants.keys[0]
            session, channel = self._here(clock) or await self._join(clock)
            reply = await get_named(session, channel, wants, clock, pickle_too)
            if isinstance(reply, Found):
                clock.version = reply.version
                return reply.values
            got, entries = reply
            into_own = wants.tensors is not None
            wants = requests_of(wants)
        else:
            clock.key, clock.version = wants[0].key, wants[0].version
            for want in wants:
                if want.tensor is not None:
                    into_own = True
                    break
            asks = wants
            if into_own:
                asked = [asks_of(want) for want in wants]
                asks = [ask for parts in asked for ask in parts]
            session, channel = self._here(clock) or await self._join(clock)
            got, entries = await get_asks(session, channel, asks, clock, pickle_too)
        if not into_own:
            for entry in entries:
                if type(entry.meta) is StateDictMeta:
                    break
            else:
                clock.version = entries[0].version
                return [*map(got.__getitem__, range(len(wants)))]
        if asked is None:
            asked = [[want] for want in wants]
        if asked[0]:
            clock.version = entries[0].version
        at = 0
        values: list[Any] = []
        dicts: list[tuple[int, int, StateDictMeta]] = []
        for want, parts in zip(wants, asked, strict=True):
            if parts and type(meta := entries[at].meta) is StateDictMeta:
                dicts.append((len(values), entries[at].version, meta))
            # Return the very tensor that was passed (a read writes into a detached alias of it).
            values.append(got[at] if want.tensor is None else want.tensor)
            at += len(parts)
        for at, version, meta in dicts:
            fetched = await _get_dict(session, channel, wants[at], version, clock, pickle_too)
            if at == 0:
                clock.version = fetched.version
            found = fetched.state_dict
            if meta.packed:
                found = await clock.within(packed.pack(found, allow_pickle=pickle_too))
            values[at] = found
        return values

    # ---- state dicts ----------------------------------------------------------------------

    @overload
    async def put_state_dict(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: Literal[True] = True,
        **arguments: Unpack[PutArguments],
    ) -> ObjectRef: ...

    @overload
    async def put_state_dict(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: Literal[False],
        **arguments: Unpack[PutArguments],
    ) -> PendingPut: ...

    @overload
    async def put_state_dict(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        blocking: bool,
        **arguments: Unpack[PutArguments],
    ) -> ObjectRef | PendingPut: ...

    async def put_state_dict(
        self,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        key: str,
        *,
        version: int | None = None,
        rewind: bool = False,
        participants: int | None = None,
        participant: str | int | None = None,
        transfer_dtype: torch.dtype | Mapping[str, torch.dtype | None] | None = None,
        partial: bool = False,
        keep: int | None = None,
        blocking: bool = True,
        when_full: str | None = None,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> ObjectRef | PendingPut:
        """Publish a state dict as one version of ``key``, visible when all participants are done.

        Entries are stored at ``f"{key}/{name}"``, where the name of a nested entry is its keys,
        joined with dots. Tied weights are stored once. This returns when this participant is done;
        to wait until the version is visible, use ``wait(key, min_version=ref.version)``. A rank
        outside all meshes has nothing to put, and gets version 0.

        Args:
            state_dict: a dict of tensors, DTensors, :class:`TensorShard`, dicts and lists of them,
                and other values; or a :class:`TorchStoreStateDict`.
            key: 1 to 4096 characters.
            version: the version to create, which must be above the newest; None: the n-th put of
                each participant contributes to the n-th version.
            rewind: go back to ``version``, as a run does that starts again from an older
                checkpoint. Readers see what there was before until that version is whole; in the
                same step it becomes the newest, every version from it on of before is gone, and so
                is what was unfinished of them. Older versions that are kept stay. Refs to what is
                gone raise VersionGoneError, although its numbers are used again. Every participant
                passes it, for the first version that the run puts, and all of them live at the same
                time: a process that ended before another joined the store is of an earlier run.
            participants: how many puts make up a version; None: the number of ranks in the meshes
                of the DTensors, and in the meshes that these were sliced from. If ranks hold
                different entries (pipeline stages, experts), they must pass it.
            participant: identifies this participant; None: the rank in ``torch.distributed``, or
                RANK.
            transfer_dtype: store floating-point entries in this dtype; or a dict of name patterns
                (``fnmatch``; the match with the most literal characters wins) to dtype or None
                (unchanged). The cast is part of the copy. Warns if none of the patterns fits an
                entry.
            partial: entries that are not given are taken from the previous version, and share its
                memory.
            keep: how many versions stay readable; None: as many as before, initially one.
            blocking: False: return a :class:`PendingPut` as soon as the values may be changed.
            when_full: as for ``put``; None: what the store was initialized with, or, if that is
                nothing and ``keep`` is above 1, ``"spillable"`` where the store can spill.
            timeout: seconds.
            allow_pickle: False refuses values that need pickle; None: the client's default.

        Raises:
            LayoutMismatchError: participants put one entry with different shapes or dtypes.
            KeyNotFoundError: ``partial`` is set, but there is no previous version.
            ConfigurationError: ``rewind`` without ``version``, or an argument is invalid.
            VersionGoneError, UnsupportedValueError, StoreFullError, ...: as for ``put``.
        """
        with self._watch("put_state_dict", timeout, key) as clock:
            check_bools(blocking=blocking)
            key = check_key(key)
            how = version, rewind, when_full, allow_pickle
            session, channel, sources, options = await self._plan(
                key,
                state_dict,
                clock,
                *how,
                participants=participants,
                participant=participant,
                transfer_dtype=transfer_dtype,
                partial=partial,
                keep=keep,
            )
            clock.entries = len(sources)
            if blocking:
                return await _publish(session, channel, key, sources, clock, options)
            if options.group is None or rides_in_message(session, sources):
                ref = await _publish(session, channel, key, sources, clock, options)
                return PendingPut.finished(ref)
            putting = Putting(session, channel, sources, clock, options)
            try:
                await putting.begin()
                await putting.write()
                return PendingPut(key, putting)
            except BaseException:
                putting.__exit__()
                raise

    async def _plan(
        self,
        key: str,
        state_dict: Mapping[str, Any] | TorchStoreStateDict,
        clock: Clock,
        version: int | None,
        rewind: bool,
        when_full: str | None,
        allow_pickle: bool | None,
        **how: Any,
    ) -> tuple[Session, Channel, Sequence[Source] | TensorColumns, PutOptions]:
        """Check the arguments, connect, and plan the put of a state dict; see ``plan_put``."""
        clock.version = exact = check_version(version, rewind=rewind)
        code = when_full_code(when_full)
        session, channel = self._here(clock) or await self._join(clock)
        pickle_too = self._moves_values(allow_pickle)
        sources, group = plan_put(
            state_dict,
            key,
            anonymous=session.anonymous,
            allow_pickle=pickle_too,
            **how,
        )
        return session, channel, sources, PutOptions(exact, group, rewind, code)

    async def get_state_dict(
        self,
        key: str,
        user_state_dict: Any = None,
        strict: bool = True,
        *,
        version: int | None = None,
        min_version: int | None = None,
        after: ObjectRef | None = None,
        cast: bool = False,
        report: StateDictReport | None = None,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> Any:
        """Get one version of a state dict, never a mixture of several.

        Args:
            key: as in ``put_state_dict``.
            user_state_dict: a state dict to fill in place and return. Its values may be tensors of
                any strides, DTensors of any layout (only their local shards are fetched) or
                TensorShards; a value of None is replaced by a new tensor, and other values are
                replaced as well. If ``user_state_dict`` is None, a new dict of whole tensors is
                returned, large ones without a copy.
            strict: every entry must match, otherwise nothing is written. False: fill what matches.
            version: get exactly this version; None: the newest.
            min_version: wait for this version or a newer one.
            after: wait for a version that follows this one, as in ``wait``; the ``report`` has the
                ref to pass the next time.
            cast: the stored dtype of a floating-point entry may differ from its destination's.
            report: filled with the differences, and the version that was read.
            timeout: seconds.
            allow_pickle: False refuses pickled values; None: the client's default.

        Raises:
            KeyNotFoundError, PartialPutError: there is no version, or no complete one.
            VersionGoneError: that version is no longer kept, or the wait would be in vain, as in
                ``wait``.
            StoreTimeoutError: the version did not appear in time.
            LayoutMismatchError: entries are missing, unexpected or mismatched (its ``details``
                have all of them, its text the first); or the destinations of two overlap in memory
                and are not the same; or two that differ have the same destination, which has the
                first of them then.
        """
        pickle_too = self._moves_values(allow_pickle)
        with self._watch("get_state_dict", timeout, key) as clock:
            clock.version = exact = check_version(version)
            check_min_version(min_version)
            check_bools(strict=strict, cast=cast)
            if report is not None and not isinstance(report, StateDictReport):
                raise ConfigurationError(f"report is a StateDictReport, or None, not {report!r}")
            if exact and min_version is not None and min_version > exact:
                raise ConfigurationError(f"version {exact} is below min_version {min_version}")
            key = check_key(key)
            wanted = getting.plan_get(key, user_state_dict)
            follows = check_after([key], min_version, after)
            if follows is not None or min_version is not None:
                await self._wait([key], min_version or 1, clock, follows)
            how = getting.Filling(strict, cast, report, pickle_too)
            session, channel = self._here(clock) or await self._join(clock)
            what = key, exact, wanted, clock, how
            result = await getting.fetch(session, channel, *what, user_state_dict=user_state_dict)
            clock.entries, clock.version = result.entries, result.version
            if self._joined.renewed is not None:
                self._joined.renewed.told([key])
            return result.state_dict


async def _publish(
    session: Session,
    channel: Channel,
    key: str,
    sources: Sequence[Source] | TensorColumns,
    clock: Clock,
    how: PutOptions,
) -> ObjectRef:
    """Put a state dict, and commit it. Returns version 0 if there is nothing to put."""
    if how.group is None:
        return ObjectRef(key, 0)
    reply = await put_sources(session, channel, sources, clock, how)
    (ref,) = refs_of([key], reply, session.welcome.incarnation)
    clock.put((key,), ref.version)
    return ref


async def _get_dict(
    session: Session,
    channel: Channel,
    want: ValueRequest,
    version: int,
    clock: Clock,
    allow_pickle: bool,
) -> getting.FetchResult:
    """Get the state dict of a key that turned out to be one."""
    how = getting.Filling(allow_pickle=allow_pickle)
    timeline = want.timeline if want.incarnation else -1
    try:
        return await getting.fetch(
            session, channel, want.key, version, None, clock, how, timeline=timeline
        )
    except VersionGoneError:
        if want.version:
            raise
        # A newer version replaced it after the first request.
        return await getting.fetch(session, channel, want.key, 0, None, clock, how)


def _wants(keys: Iterable[Any] | Mapping[str, Any]) -> Iterable[ValueRequest]:
    if isinstance(keys, Mapping):
        for key, how in keys.items():
            if isinstance(how, TensorSlice):
                yield ValueRequest.make(key, None, how)
            else:
                yield ValueRequest.make(key, how)
        return
    if isinstance(keys, str):
        raise UnsupportedValueError("get_batch takes a list of keys or a dict, not one str")
    for what in keys:
        yield ValueRequest.make(what)


def _label(what: Any) -> Any:
    """What a value is found by in the result of a batch."""
    if isinstance(what, ObjectRef | HeldRef | Request):
        return what.key or what
    return what


def _refuse_ambiguous(wants: Iterable[ValueRequest]) -> None:
    """The result has one value per key: a key may be repeated only with the same request."""
    by_key: dict[str, ValueRequest] = {}
    for want in wants:
        other = by_key.setdefault(want.key or f"object {want.version}", want)
        if (other.version, other.part) != (want.version, want.part):
            raise ConfigurationError(
                f"{want.key!r} is asked for twice, at different versions or slices; "
                "get_batch gives one value per key: ask in two calls"
            )
