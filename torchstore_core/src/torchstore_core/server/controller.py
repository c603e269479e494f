"""The brain: index, versions, leases, placement, memory accounting.

A synchronous state machine: every method decides at once and does no I/O, so that every request is
one consistent cut. Connections call it and send what it returns; errors are raised.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from torchstore_core.contracts.strategy import ClientFacts, Strategy
from torchstore_core.errors import (
    PluginError,
    ProtocolError,
    StoreClosedError,
    VersionGoneError,
)
from torchstore_core.server.allocator import rounded
from torchstore_core.server.placement import allocate, checked_items, full_error, missing_error
from torchstore_core.server.records import SessionRecord, Txn, Value, VolumeRecord, Waiter
from torchstore_core.topology import Topology
from torchstore_core.wire import messages as m

__all__ = ["Controller"]

_MAX_GIVEN_BACK = 100_000
# Deleted keys whose last version is remembered.
_MAX_DELETED = 4096


class Controller:
    """State of one store.

    Args:
        volumes: where bytes can go.
        strategy: decides which volume.
        prefault: keep this kind of look-ahead: after a put of n bytes, n more are kept warm.
        warmed: called (from a thread) when a background prefault ended.
    """

    def __init__(
        self,
        volumes: Sequence[VolumeRecord],
        strategy: Strategy,
        *,
        prefault: bool = True,
        warmed: Callable[[], None] = lambda: None,
    ) -> None:
        self.volumes = list(volumes)
        self.strategy = strategy
        self.index: dict[str, Value] = {}
        self.sessions: dict[bytes, SessionRecord] = {}
        #: Requests so far, by message class; for status.
        self.operations: dict[type[m.Message], int] = defaultdict(int)
        self._prefault = prefault
        self._warmed = warmed
        # A key that is put again after a delete goes on above its last version, so no (key,
        # version) is ever used twice. The last versions of the latest deleted keys are remembered;
        # keys that are not go on above the highest version that was forgotten.
        self._deleted: dict[str, int] = {}
        self._version_floor = 0
        self._last_put = time.monotonic()
        self._waiters: dict[str, set[Waiter]] = {}

    # ---- sessions -------------------------------------------------------------------------

    def open_session(self, facts: ClientFacts, topology: Topology) -> SessionRecord:
        """A new session with a fresh secret token."""
        session = SessionRecord(secrets.token_bytes(16), facts, topology)
        self.sessions[session.token] = session
        return session

    def join_session(self, token: bytes) -> SessionRecord:
        """The session that a lane's token names."""
        session = self.sessions.get(token)
        if session is None:
            raise StoreClosedError("this session has ended; connect again")
        return session

    def close_session(self, session: SessionRecord) -> None:
        """Undo everything the session had open."""
        if self.sessions.pop(session.token, None) is None:
            return
        self.abort(session, list(session.txns))
        self.release(session, list(session.leases), [])

    # ---- put ------------------------------------------------------------------------------

    def put(self, session: SessionRecord, request: m.Put) -> list[int] | list[m.Grant]:
        """Begin a put: versions if all of it was inline (and is committed), else grants.

        Raises:
            StoreFullError: no volume that the strategy names has room; nothing was changed.
            ProtocolError: the txn id is in use, or sizes make no sense.
        """
        placed, inline, sizes = checked_items(request.items)
        if request.txn in session.txns:
            raise ProtocolError(f"put id {request.txn} is in use")
        if request.txn in session.given_back:
            session.given_back.discard(request.txn)
            raise ProtocolError(f"put id {request.txn} was aborted before it began")
        volume, offsets = self._place(session.facts, placed, inline, sizes)
        volume.inline += inline
        values: list[Value] = []
        at = 0
        index = volume.index
        for item in request.items:
            offset = -1
            if item.data is None:
                offset = offsets[at]
                at += 1
            values.append(
                Value(item.key, item.meta, item.nbytes, index, item.data, offset, session.facts)
            )
        if not sizes:
            return self._commit(values)
        self._last_put = time.monotonic()
        session.txns[request.txn] = Txn(values, placed)
        volume.unfinished += placed
        return [m.Grant(index, 0, offset) for offset in offsets]

    def _place(
        self, facts: ClientFacts, placed: int, inline: int, sizes: list[int]
    ) -> tuple[VolumeRecord, list[int]]:
        """The first volume of the strategy's order with room, and an offset for each size."""
        order: Sequence[int] = (0,)
        if len(self.volumes) > 1:
            order = self.strategy.place(facts, [v.facts() for v in self.volumes], placed + inline)
        for index in order:
            if not 0 <= index < len(self.volumes):
                raise PluginError(
                    f"strategy {type(self.strategy).__name__} named volume {index} "
                    f"of {len(self.volumes)}"
                )
            volume = self.volumes[index]
            if volume.used + placed + inline > volume.info.capacity_bytes:
                continue
            offsets = allocate(volume, placed, sizes)
            if offsets is not None:
                return volume, offsets
        if not order:
            raise PluginError(f"strategy {type(self.strategy).__name__} named no volume")
        raise full_error(placed + inline, self.volumes, self.sessions.values(), self.index.values())

    def commit(self, session: SessionRecord, txn_id: int) -> list[int]:
        """Flip all keys of a put at once; their new versions, in order."""
        txn = session.txns.pop(txn_id, None)
        if txn is None:
            raise ProtocolError(f"there is no unfinished put {txn_id} to commit")
        volume = self._finish(txn)
        versions = self._commit(txn.values)
        if self._prefault:
            self._look_ahead(volume, txn.nbytes)
        return versions

    def _commit(self, values: list[Value]) -> list[int]:
        now = time.time()
        dead: list[Value] = []
        versions: list[int] = []
        index = self.index
        for value in values:
            old = index.get(value.key)
            if old is None:
                value.version = self._deleted.pop(value.key, self._version_floor) + 1
            else:
                value.version = old.version + 1
                old.live = False
                if old.data is not None:
                    self.volumes[old.volume].inline -= old.nbytes
                elif not old.pins:
                    dead.append(old)
            value.live = True
            value.created = now
            index[value.key] = value
            versions.append(value.version)
        if dead:
            self._free(dead)
        if self._waiters:
            self._wake(values)
        return versions

    def abort(
        self, session: SessionRecord, txn_ids: Iterable[int], *, remember: bool = False
    ) -> None:
        """Give unfinished puts' memory back.

        ``remember``: unknown ids are refused later (their Put comes by another, slower pipe).
        """
        for txn_id in txn_ids:
            txn = session.txns.pop(txn_id, None)
            if txn is None:
                if remember:
                    self._remember(session, txn_id)
                continue
            self._finish(txn)
            self._free(txn.values)

    def _finish(self, txn: Txn) -> VolumeRecord:
        """The put is over, one way or the other: its memory has been written to."""
        volume = self.volumes[txn.values[0].volume]
        volume.unfinished -= txn.nbytes
        end = max((v.offset + v.nbytes for v in txn.values if v.data is None), default=0)
        volume.memory.touched(end)
        return volume

    def _look_ahead(self, volume: VolumeRecord, nbytes: int) -> None:
        """Keep as much warm and free as the last put took: its successor goes beside it."""
        memory = volume.memory
        short = nbytes - (memory.warm - volume.allocator.used)
        if short > 0:
            limit = volume.info.capacity_bytes
            memory.prefault(min(max(memory.warm, 0) + short, limit), self._warmed)

    def trim(self, idle_s: float, keep: int) -> int:
        """Give free pool memory back to the system when no put has come for ``idle_s`` seconds.

        Args:
            keep: bytes of each volume to keep warm whatever happens.

        Returns:
            Bytes given back.
        """
        if time.monotonic() - self._last_put < idle_s:
            return 0
        if any(session.keeps_memory for session in self.sessions.values()):
            return 0
        return sum(
            volume.memory.trim(max(volume.allocator.used_end, keep)) for volume in self.volumes
        )

    # ---- get ------------------------------------------------------------------------------

    def locate(self, session: SessionRecord, request: m.Locate) -> tuple[list[m.Entry], bool]:
        """Entries for all wants in one cut, and whether they are leased under ``lease``.

        Raises:
            KeyNotFoundError, VersionGoneError: nothing is leased.
            ProtocolError: the lease id is in use, or inline values do not fit the reply.
        """
        values = self._find(request.wants)
        nbytes = inline = sum(v.nbytes for v in values)
        if nbytes > request.inline_max:
            inline = sum(v.nbytes for v in values if v.data is not None)
        if inline > m.MAX_FRAME // 2:
            raise ProtocolError(
                f"{inline} bytes of inline values do not fit one reply; get fewer keys at once"
            )
        if inline == nbytes:
            return [self._inline_entry(v) for v in values], False
        if request.lease in session.leases:
            raise ProtocolError(f"lease id {request.lease} is in use")
        if request.lease in session.given_back:
            session.given_back.discard(request.lease)
            raise ProtocolError(f"lease id {request.lease} was given back before it began")
        held: list[Value | None] = []
        entries: list[m.Entry] = []
        for value in values:
            if value.data is not None:
                entries.append(m.Entry(value.version, value.meta, value.nbytes, value.data, None))
                held.append(None)
                continue
            self._pin(value)
            held.append(value)
            grant = m.Grant(value.volume, 0, value.offset)
            entries.append(m.Entry(value.version, value.meta, value.nbytes, None, grant))
        session.leases[request.lease] = held
        return entries, True

    def _find(self, wants: Sequence[m.Want]) -> list[Value]:
        index = self.index
        found: list[Value] = []
        missing: list[str] = []
        for want in wants:
            value = index.get(want.key)
            if want.version:
                if value is None or value.version != want.version:
                    now = "no such key" if value is None else f"it is at {value.version} now"
                    raise VersionGoneError(
                        f"version {want.version} of {want.key!r} is gone: {now}",
                        key=want.key,
                        details={"current": 0 if value is None else value.version},
                    )
            elif value is None:
                missing.append(want.key)
                continue
            found.append(value)
        if missing:
            raise missing_error(missing)
        return found

    def _inline_entry(self, value: Value) -> m.Entry:
        data = value.data
        if data is None:
            data = self.volumes[value.volume].memory.read(value.offset, value.nbytes)
        return m.Entry(value.version, value.meta, value.nbytes, data, None)

    def release(
        self,
        session: SessionRecord,
        leases: Iterable[int],
        parts: Iterable[tuple[int, list[int]]],
        *,
        remember: bool = False,
    ) -> None:
        """Give leases back, whole or in part; what nobody needs any more is freed."""
        dead: list[Value] = []
        for lease in leases:
            held = session.leases.pop(lease, None)
            if held is None:
                if remember:
                    self._remember(session, lease)
                continue
            for value in held:
                if value is not None:
                    self._unpin(value, dead)
        for lease, positions in parts:
            held = session.leases.get(lease)
            if held is None:
                continue
            for at in positions:
                value = held[at] if 0 <= at < len(held) else None
                if value is not None:
                    held[at] = None
                    self._unpin(value, dead)
            if not any(v is not None for v in held):
                del session.leases[lease]
        self._free(dead)

    # ---- keys -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[str], strict: bool) -> int:
        """Delete keys; how many there were. ``strict``: all must exist, else none is deleted."""
        if strict:
            missing = [key for key in keys if key not in self.index]
            if missing:
                raise missing_error(missing)
        dead: list[Value] = []
        count = 0
        for key in keys:
            value = self.index.pop(key, None)
            if value is None:
                continue
            count += 1
            value.live = False
            self._bury(key, value.version)
            if not value.pins:
                dead.append(value)
        self._free(dead)
        return count

    def _bury(self, key: str, version: int) -> None:
        self._deleted[key] = version
        if len(self._deleted) > _MAX_DELETED:
            forgotten = next(iter(self._deleted))
            self._version_floor = max(self._version_floor, self._deleted.pop(forgotten))

    def keys(self, prefix: str) -> list[str]:
        """Sorted keys that start with ``prefix``."""
        return sorted(key for key in self.index if key.startswith(prefix))

    def stat(self, request: m.Stat) -> m.Found:
        """What is known of one key."""
        value = self._find([m.Want(request.key)])[0]
        return m.Found(
            request.id,
            value.key,
            value.version,
            value.meta,
            value.nbytes,
            self.volumes[value.volume].info.id,
            -1 if value.data is not None else 0,
            value.offset,
            value.pins,
            value.created,
            value.creator,
        )

    def listing(self, prefix: str, after: str) -> tuple[list[m.Listed], bool]:
        """What is known of the keys above ``after`` that start with ``prefix``: one page, sorted,
        and whether there are more.
        """
        names = sorted(key for key in self.index if key > after and key.startswith(prefix))
        entries: list[m.Listed] = []
        room = m.MAX_LISTED_CHARS
        for key in names[: m.MAX_LISTED]:
            room -= len(key)
            if room < 0:
                break
            value = self.index[key]
            entries.append(
                m.Listed(
                    key,
                    value.version,
                    value.meta,
                    value.nbytes,
                    self.volumes[value.volume].info.id,
                    -1 if value.data is not None else 0,
                    value.pins,
                    value.created,
                    value.creator.pid,
                )
            )
        return entries, len(entries) < len(names)

    # ---- wait -----------------------------------------------------------------------------

    def wait(
        self, keys: list[str], min_version: int, reply: Callable[[list[int]], None]
    ) -> Waiter | None:
        """Call ``reply`` with the versions once all keys are there; None if it did so at once."""
        waiter = Waiter(keys, min_version, reply)
        versions = self._satisfied(waiter)
        if versions is not None:
            reply(versions)
            return None
        for key in keys:
            self._waiters.setdefault(key, set()).add(waiter)
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Drop a waiter."""
        for key in waiter.keys:
            waiting = self._waiters.get(key)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._waiters[key]

    def _satisfied(self, waiter: Waiter) -> list[int] | None:
        versions: list[int] = []
        for key in waiter.keys:
            value = self.index.get(key)
            if value is None or value.version < waiter.min_version:
                return None
            versions.append(value.version)
        return versions

    def _wake(self, values: Iterable[Value]) -> None:
        woken: set[Waiter] = set()
        for value in values:
            woken |= self._waiters.get(value.key, set())
        for waiter in woken:
            versions = self._satisfied(waiter)
            if versions is not None:
                self.forget(waiter)
                waiter.reply(versions)

    # ---- memory ---------------------------------------------------------------------------

    def _pin(self, value: Value) -> None:
        value.pins += 1
        if value.pins == 1:
            self.volumes[value.volume].leased += rounded(value.nbytes)

    def _unpin(self, value: Value, dead: list[Value]) -> None:
        value.pins -= 1
        if value.pins == 0:
            self.volumes[value.volume].leased -= rounded(value.nbytes)
            if not value.live:
                dead.append(value)

    def _free(self, values: Iterable[Value]) -> None:
        ranges: dict[int, list[tuple[int, int]]] = {}
        for value in values:
            if value.data is not None:
                self.volumes[value.volume].inline -= value.nbytes
            else:
                ranges.setdefault(value.volume, []).append((value.offset, value.nbytes))
        for index, dead in ranges.items():
            self.volumes[index].allocator.free(dead)

    def _remember(self, session: SessionRecord, given_back: int) -> None:
        if len(session.given_back) < _MAX_GIVEN_BACK:
            session.given_back.add(given_back)
