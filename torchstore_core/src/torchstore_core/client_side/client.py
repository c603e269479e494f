"""The client object: every operation of the store, on whatever event loop calls it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torchstore_core.client_side import writing
from torchstore_core.client_side.lane import Lane
from torchstore_core.client_side.operations import (
    Clock,
    Want,
    cancel_wait,
    get_wants,
    put_sources,
)
from torchstore_core.client_side.session import Session
from torchstore_core.contracts.observer import Operation
from torchstore_core.errors import (
    ConfigurationError,
    StoreTimeoutError,
    UnsupportedValueError,
)
from torchstore_core.values import ObjectRef, Request, TensorSlice
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    import torch

    from torchstore_core.client_side.stores import Membership

__all__ = ["Client"]

# Requests that the server answers faster than a task switch takes.
_QUICK = frozenset(("delete", "exists", "stat"))
R = TypeVar("R", bound=m.Message)


class Client:
    """A process's door to one store; made by ``initialize``, ``connect`` and ``client()``.

    Safe to use from several event loops and threads, over repeated ``asyncio.run``, and in a
    forked child (which gets connections of its own). Every operation takes ``timeout=`` (seconds;
    None: the store's default, given to ``initialize`` or ``connect``).

    What every operation raises, beside what its own text says:

    * ``StoreTimeoutError``: the timeout is over.
    * ``StoreClosedError``: the server is gone, or the store was shut down in this process.
    * ``UnsupportedValueError``: a key is not a str of 1 to 4096 characters.
    * ``ConfigurationError``: a negative timeout.
    * ``ProtocolError``: too many keys for one message (64 MiB), or keys that are not Unicode.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> None:
        self._membership = membership
        self._timeout = membership.timeout if timeout is None else timeout
        self._allow_pickle = membership.allow_pickle if allow_pickle is None else allow_pickle

    def __repr__(self) -> str:
        return f"<Client of store {self._membership.store_name!r} at {self._membership.address}>"

    @property
    def address(self) -> str:
        """What other processes give to ``connect``."""
        return self._membership.address

    @property
    def store_name(self) -> str:
        """The store's name."""
        return self._membership.store_name

    # ---- put ------------------------------------------------------------------------------

    async def put(
        self,
        key: str,
        value: Any,
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> ObjectRef:
        """Store a value as the next version of ``key``; the value may be changed afterwards.

        Args:
            key: 1 to 4096 characters.
            value: a dense tensor of any shape, dtype and strides (CPU or CUDA; stored detached),
                or any other Python object.
            timeout: seconds.
            allow_pickle: False refuses objects that need pickle; None: the client's default.

        Raises:
            StoreFullError: it does not fit; nothing was changed.
            UnsupportedValueError: a value that cannot be stored (meta, sparse, ... tensors).
            UnsafeObjectError: it needs pickle, which is not allowed.
            TransportUnavailableError: no permitted transport reaches the volume.
            PluginError: the store's strategy names no volume.
        """
        versions = await self._put("put", ((key, value),), timeout, allow_pickle)
        return ObjectRef(key, versions[0])

    async def put_batch(
        self,
        items: Mapping[str, Any],
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> dict[str, ObjectRef]:
        """Store several values atomically: readers see all of them or none. Raises as ``put``."""
        if not isinstance(items, Mapping):
            raise UnsupportedValueError(
                f"put_batch takes a dict of key to value, not a {type(items).__qualname__}"
            )
        if not items:
            return {}
        versions = await self._put("put_batch", items.items(), timeout, allow_pickle)
        return {k: ObjectRef(k, version) for k, version in zip(items, versions, strict=True)}

    async def _put(
        self,
        name: str,
        items: Collection[tuple[str, Any]],
        timeout: float | None,
        allow_pickle: bool | None,
    ) -> list[int]:
        clock = self._clock(timeout)
        pickle_too = self._allow_pickle if allow_pickle is None else allow_pickle
        nbytes = 0
        transport = ""
        error = ""
        try:
            sources = [writing.prepare(key, value, allow_pickle=pickle_too) for key, value in items]
            nbytes = sum(source.nbytes for source in sources)
            session, lane = self._here() or await self._join(clock)
            versions, transport = await put_sources(session, lane, sources, nbytes, clock)
        except BaseException as caught:
            error = getattr(caught, "code", type(caught).__name__)
            raise
        finally:
            if self._membership.observe is not None:
                self._observe(name, clock, len(items), nbytes, transport, error)
        return versions

    # ---- get ------------------------------------------------------------------------------

    async def get(
        self,
        key_or_ref: str | ObjectRef | Request,
        inplace_tensor: torch.Tensor | None = None,
        tensor_slice_spec: TensorSlice | None = None,
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> Any:
        """The value of a key.

        On the volume's host a large tensor comes without a copy: an ordinary writable tensor on a
        private mapping. Writing to it changes nothing for anyone else, and its memory is not
        reused while it lives.

        Args:
            key_or_ref: a key (newest version), an ``ObjectRef`` (exactly that version) or a
                ``Request``.
            inplace_tensor: filled and returned; same shape and dtype, any strides.
            tensor_slice_spec: only this part; ``inplace_tensor`` then has its ``local_shape``.
            timeout: seconds.
            allow_pickle: False refuses pickled objects; None: the client's default.

        Raises:
            KeyNotFoundError: no such key.
            VersionGoneError: the ref's version was overwritten or deleted.
            LayoutMismatchError: destination or slice do not fit; nothing was written.
            UnsafeObjectError: it was pickled, which is not allowed.
            UnsupportedValueError: a destination that cannot be written to (meta, sparse, ...), or
                a value that cannot be rebuilt here.
            TransportUnavailableError: no permitted transport reaches the volume.
        """
        want = Want.make(key_or_ref, inplace_tensor, tensor_slice_spec)
        values = await self._get("get", [want], timeout, allow_pickle)
        return values[0]

    async def get_batch(
        self,
        keys: Iterable[str | ObjectRef | Request] | Mapping[str, Any],
        *,
        timeout: float | None = None,
        allow_pickle: bool | None = None,
    ) -> dict[str, Any]:
        """Several values in one consistent cut, all or nothing.

        Args:
            keys: a list of keys, refs or requests, one a key; or a dict of key to destination
                tensor, ``TensorSlice``, or None.

        Returns:
            Values by key, in the order asked for.

        Raises:
            KeyNotFoundError: ``details["missing"]`` lists all missing keys.
            ConfigurationError: a key is asked for twice, at different versions or slices.
            And as ``get``.
        """
        wants = [*_wants(keys)]
        if not wants:
            return {}
        if len({want.key for want in wants}) < len(wants):
            _refuse_ambiguous(wants)
        values = await self._get("get_batch", wants, timeout, allow_pickle)
        return {want.key: value for want, value in zip(wants, values, strict=True)}

    async def _get(
        self, name: str, wants: Sequence[Want], timeout: float | None, allow_pickle: bool | None
    ) -> list[Any]:
        clock = self._clock(timeout)
        pickle_too = self._allow_pickle if allow_pickle is None else allow_pickle
        nbytes = 0
        transport = ""
        error = ""
        try:
            session, lane = self._here() or await self._join(clock)
            result, nbytes = await get_wants(session, lane, wants, clock, pickle_too)
            transport = result.transport
        except BaseException as caught:
            error = getattr(caught, "code", type(caught).__name__)
            raise
        finally:
            if self._membership.observe is not None:
                self._observe(name, clock, len(wants), nbytes, transport, error)
        # The very tensor that was given (a read writes into a detached alias of it).
        return [
            result.values[at] if want.tensor is None else want.tensor
            for at, want in enumerate(wants)
        ]

    # ---- keys -----------------------------------------------------------------------------

    async def delete(self, key: str, *, timeout: float | None = None) -> None:
        """Delete a key. Readers that hold its tensors keep them.

        Raises:
            KeyNotFoundError: no such key.
        """
        await self._delete("delete", [key], True, timeout)

    async def delete_batch(self, keys: Iterable[str], *, timeout: float | None = None) -> int:
        """Delete keys; missing ones are ignored. How many were deleted.

        Raises:
            UnsupportedValueError: one str instead of several.
        """
        return await self._delete("delete_batch", _key_list(keys), False, timeout)

    async def _delete(self, name: str, keys: list[str], strict: bool, timeout: float | None) -> int:
        if not keys:
            return 0
        for key in keys:
            writing.check_key(key)
        reply = await self._call(
            name, m.Deleted, m.Delete, timeout, keys, strict, entries=len(keys)
        )
        return reply.count

    async def exists(self, key: str, *, timeout: float | None = None) -> bool:
        """Whether a key has a committed value. Raises what every operation does."""
        writing.check_key(key)
        reply = await self._call("exists", m.Flags, m.Exists, timeout, [key])
        return reply.flags[0]

    async def keys(self, prefix: str | None = None, *, timeout: float | None = None) -> list[str]:
        """Keys that start with ``prefix`` (as ``str.startswith``), sorted.

        Raises:
            UnsupportedValueError: the prefix is not a str.
        """
        if not (prefix is None or isinstance(prefix, str)):
            raise UnsupportedValueError(f"a prefix is a str, not a {type(prefix).__qualname__}")
        reply = await self._call("keys", m.KeyList, m.Keys, timeout, prefix or "")
        return reply.keys

    async def wait(
        self,
        keys: str | Iterable[str],
        *,
        min_version: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, ObjectRef]:
        """Wait until every key exists, with a version of at least ``min_version``.

        Returns:
            The refs that fulfilled it, by key.

        Raises:
            StoreTimeoutError: not within ``timeout`` seconds.
            UnsupportedValueError: ``min_version`` is not an int.
        """
        names = [keys] if isinstance(keys, str) else _key_list(keys)
        for key in names:
            writing.check_key(key)
        if not (min_version is None or isinstance(min_version, int)):
            raise UnsupportedValueError(f"min_version is an int or None, not {min_version!r}")
        if not names:
            return {}
        clock = self._clock(timeout)
        error = ""
        try:
            versions = await self._wait(names, min_version or 1, clock)
        except BaseException as caught:
            error = getattr(caught, "code", type(caught).__name__)
            raise
        finally:
            self._observe("wait", clock, len(names), 0, "", error)
        return {k: ObjectRef(k, v) for k, v in zip(names, versions, strict=True)}

    async def _wait(self, names: list[str], min_version: int, clock: Clock) -> list[int]:
        _, lane = self._here() or await self._join(clock)
        request = m.Wait(lane.next_id(), names, min_version)
        try:
            reply = await lane.call(request, m.Committed, clock.left())
        except StoreTimeoutError as caught:
            cancel_wait(lane, request.id)
            least = f" with version {min_version} or newer" if min_version > 1 else ""
            raise StoreTimeoutError(
                f"not there within {clock.timeout} s{least}: {', '.join(map(repr, names[:5]))}",
                key=names[0],
            ) from caught
        except BaseException:
            cancel_wait(lane, request.id)
            raise
        return reply.versions

    # ---- looking --------------------------------------------------------------------------

    async def stat(self, key: str, *, timeout: float | None = None) -> m.Found:
        """What the store knows of a key: version, kind, bytes, place, leases, creator.

        Raises:
            KeyNotFoundError: no such key.
        """
        writing.check_key(key)
        return await self._call("stat", m.Found, m.Stat, timeout, key)

    async def status(self, *, timeout: float | None = None) -> m.StatusReport:
        """Volumes, memory, sessions, operations. Raises what every operation does."""
        return await self._call("status", m.StatusReport, m.Status, timeout)

    async def explain(
        self, nbytes: int = 1 << 30, *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """For every volume: who would move ``nbytes`` bytes, what each transport bid, and why the
        others refused. Plain data. Raises what every operation does.
        """
        session = await self._membership.session(self._clock(timeout).left())
        return [_explain(volume.info.id, volume.ranking, nbytes) for volume in session.volumes]

    # ---- inside ---------------------------------------------------------------------------

    def _here(self) -> tuple[Session, Lane] | None:
        """Session and lane if both are open: the path of every call but the first."""
        session = self._membership.session_here()
        lane = None if session is None else session.lane_here()
        return None if session is None or lane is None else (session, lane)

    async def _join(self, clock: Clock) -> tuple[Session, Lane]:
        session = await self._membership.session(clock.left())
        return session, await session.lane(clock.left())

    def _clock(self, timeout: float | None) -> Clock:
        if timeout is None:
            timeout = self._timeout
        elif not timeout >= 0:
            raise ConfigurationError(f"timeout is seconds, at least 0, not {timeout!r}")
        return Clock(timeout)

    async def _call(
        self,
        name: str,
        expect: type[R],
        message: type[Any],
        timeout: float | None,
        *args: Any,
        entries: int = 1,
    ) -> R:
        clock = self._clock(timeout)
        error = ""
        try:
            _, lane = self._here() or await self._join(clock)
            request = message(lane.next_id(), *args)
            return await lane.call(request, expect, clock.left(), quick=name in _QUICK)
        except BaseException as caught:
            error = getattr(caught, "code", type(caught).__name__)
            raise
        finally:
            self._observe(name, clock, entries, 0, "", error)

    def _observe(
        self, name: str, clock: Clock, entries: int, nbytes: int, transport: str, error: str
    ) -> None:
        observe = self._membership.observe
        if observe is not None:
            seconds = time.perf_counter() - clock.start
            observe(
                Operation(
                    name,
                    self.store_name,
                    entries,
                    nbytes,
                    transport,
                    seconds,
                    clock.phases,
                    error,
                )
            )


def _wants(keys: Iterable[Any] | Mapping[str, Any]) -> Iterable[Want]:
    if isinstance(keys, Mapping):
        for key, how in keys.items():
            if isinstance(how, TensorSlice):
                yield Want.make(key, None, how)
            else:
                yield Want.make(key, how)
        return
    if isinstance(keys, str):
        raise UnsupportedValueError("get_batch takes a list of keys or a dict, not one str")
    for what in keys:
        yield Want.make(what)


def _refuse_ambiguous(wants: Iterable[Want]) -> None:
    """The result has one value per key: a key may come twice only if it asks for the same."""
    by_key: dict[str, Want] = {}
    for want in wants:
        other = by_key.setdefault(want.key, want)
        if (other.version, other.part) != (want.version, want.part):
            raise ConfigurationError(
                f"{want.key!r} is asked for twice, at different versions or slices; "
                "get_batch gives one value per key: ask in two calls"
            )


def _key_list(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str):
        raise UnsupportedValueError("a list of keys is needed, not one str")
    return list(keys)


def _explain(volume: str, ranking: Any, nbytes: int) -> dict[str, Any]:
    order = ranking.order(nbytes)
    return {
        "volume": volume,
        "nbytes": nbytes,
        "chosen": order[0].spec.name if order else None,
        "inline_up_to": ranking.inline_max(),
        "bids": [
            {
                "transport": c.spec.name,
                "latency_s": c.bid.latency_s,
                "bytes_per_s": c.bid.bytes_per_s,
                "cost_s": c.cost_s(nbytes),
                "preferred": c.preferred,
                "reason": c.bid.reason,
            }
            for c in order
        ],
        "refusals": ranking.refusals,
    }
