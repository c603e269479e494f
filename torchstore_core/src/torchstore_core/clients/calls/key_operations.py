"""Operations on keys: delete, list, wait, and inspect a store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from torchstore_core.clients.calls import observers, wait_errors
from torchstore_core.clients.calls.arguments import (
    check_key,
    check_min_version,
    check_size,
    check_version,
    listed,
)
from torchstore_core.clients.calls.base import QUICK, ClientBase
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.calls.incarnations import check_after, check_incarnation, refs_of
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.errors import StoreTimeoutError, UnsupportedValueError
from torchstore_core.reports.stat import Found
from torchstore_core.reports.status import StatusReport
from torchstore_core.values import ObjectRef
from torchstore_core.wire import messages as m


class KeyOperations(ClientBase):
    """The operations of a client that transfer no values."""

    # ---- keys -----------------------------------------------------------------------------

    async def delete(self, key: str, *, timeout: float | None = None) -> None:
        """Delete all versions of a key, including unfinished ones. Readers keep their tensors.

        A state dict can only be deleted as a whole; its entries cannot be deleted separately.

        Raises:
            KeyNotFoundError: the key does not exist.
        """
        with self._watch("delete", timeout, key) as clock:
            await self._delete(clock, [key], strict=True)

    async def delete_batch(self, keys: Iterable[str], *, timeout: float | None = None) -> int:
        """Delete several keys and return how many were deleted; missing keys are ignored.

        Raises:
            UnsupportedValueError: ``keys`` is a single str.
        """
        with self._watch("delete_batch", timeout) as clock:
            return await self._delete(clock, _key_list(keys), strict=False)

    async def _delete(self, clock: Clock, keys: list[str], *, strict: bool) -> int:
        keys = _checked(clock, keys)
        if not keys:
            return 0
        session, channel = self._here(clock) or await self._join(clock)
        request = m.Delete(channel.next_id(), keys, strict, session.next_id())
        return (
            await channel.call(request, m.Deleted, clock.left(), quick=clock.name in QUICK)
        ).count

    async def exists(self, key: str, *, timeout: float | None = None) -> bool:
        """Whether a key, or an entry of a state dict, has a complete version that can be read.
        False if any part of it is lost. Raises only what every operation may raise.
        """
        with self._watch("exists", timeout, key) as clock:
            return (await self._call(clock, m.Flags, m.Exists, [check_key(key)])).flags[0]

    async def keys(self, prefix: str | None = None, *, timeout: float | None = None) -> list[str]:
        """Return the keys that start with ``prefix`` (as ``str.startswith``), sorted.

        A state dict is listed with its own key, and with each entry as ``<key>/<name>``. Keys whose
        value is lost are listed, too. Keys that begin with ``.torchstore-`` belong to parts of the
        library, and are listed only if the prefix begins with that.

        Raises:
            UnsupportedValueError: the prefix is not a str.
        """
        with self._watch("keys", timeout) as clock:
            if not (prefix is None or isinstance(prefix, str)):
                raise UnsupportedValueError(f"a prefix is a str, not a {type(prefix).__qualname__}")
            start = str.__str__(prefix or "")
            return (await self._call(clock, m.KeyList, m.Keys, start)).keys

    async def versions(self, key: str, *, timeout: float | None = None) -> list[int]:
        """Return the versions of a key that can be read, in ascending order; [] if there are none.

        Only a state dict that was put with ``keep=`` has more than one. Raises only what every
        operation may raise.
        """
        with self._watch("versions", timeout, key) as clock:
            return await self._versions(clock, key)

    async def latest_version(self, key: str, *, timeout: float | None = None) -> int:
        """Return the newest version of a key that can be read; 0 if there is none. Raises only what
        every operation may raise.
        """
        with self._watch("latest_version", timeout, key) as clock:
            await self._versions(clock, key)
            return clock.version

    async def _versions(self, clock: Clock, key: str) -> list[int]:
        key = check_key(key)
        found = (await self._call(clock, m.Committed, m.Versions, key)).versions
        if self._joined.renewed is not None:
            self._joined.renewed.told([key])
        clock.version = found[-1] if found else 0
        return found

    async def wait(
        self,
        keys: str | Iterable[str],
        *,
        min_version: int | None = None,
        after: ObjectRef | None = None,
        timeout: float | None = None,
    ) -> dict[str, ObjectRef]:
        """Wait until every key has a complete version that is at least ``min_version``.

        Args:
            keys: one key, or several.
            min_version: the lowest version that will do; None: any.
            after: wait for a version that follows this one; ``keys`` is its key. Unlike a number,
                a ref belongs to one incarnation of a store and to one history of a key, so that
                its reader is told when either has started over.
            timeout: seconds; 0: only look.

        Returns:
            For each key, the ref of the version that met the condition.

        Raises:
            StoreTimeoutError: it did not happen within ``timeout`` seconds.
            VersionGoneError: the wait would be in vain, now or since it began: the store has
                started again without its memory, or the key was rewound to before ``after`` or
                to below ``min_version``. Start over without them.
            StoreClosedError: the server has ended.
            UnsupportedValueError: ``min_version`` is not an int, or ``after`` not an ObjectRef.
            ConfigurationError: ``after`` is of another key, or both are given.
        """
        with self._watch("wait", timeout) as clock:
            names = _checked(clock, [keys] if isinstance(keys, str) else _key_list(keys))
            check_min_version(min_version)
            clock.version = min_version or 0
            if not names:
                return {}
            refs = await self._wait(
                names, min_version or 1, clock, check_after(names, min_version, after)
            )
            clock.version = refs[0].version
        return {ref.key: ref for ref in refs}

    async def _wait(
        self, names: list[str], min_version: int, clock: Clock, after: ObjectRef | None = None
    ) -> list[ObjectRef]:
        session, channel = self._here(clock) or await self._join(clock)
        renewed = self._joined.renewed
        incarnation = session.welcome.incarnation
        if after is not None:
            clock.version = min_version = after.version + 1
            what = after.key, after.version, after.incarnation
            await check_incarnation(session, channel, clock, *what)
        request: m.Wait
        if after is not None and after.incarnation:
            request = m.WaitAfter(channel.next_id(), names, min_version, after.timeline)
        else:
            if renewed is not None:
                renewed.check(names, min_version, self.store_name)
            request = m.Wait(channel.next_id(), names, min_version)
        try:
            reply = await channel.call(request, m.Committed, clock.left())
        except BaseException as error:
            channel.cancel(request.id)
            if not isinstance(error, StoreTimeoutError):
                raise
            unmet = await wait_errors.unmet_keys(channel, names, min_version)
            if unmet is None or unmet:
                raise wait_errors.wait_timeout(names, min_version, clock.timeout, unmet) from None
            # All of it is there, as it often is for who only looks, with a timeout of 0.
            request = msgspec.structs.replace(request, id=channel.next_id())
            try:
                reply = await channel.call(request, m.Committed, wait_errors.REQUEST_TIMEOUT_S)
            except BaseException as late:
                channel.cancel(request.id)
                if not isinstance(late, StoreTimeoutError):
                    raise
                raise wait_errors.wait_timeout(names, min_version, clock.timeout, None) from None
        if renewed is not None:
            renewed.told(names)
        return refs_of(names, reply, incarnation)

    # ---- inspecting -----------------------------------------------------------------------

    async def stat(
        self, key: str, *, version: int | None = None, timeout: float | None = None
    ) -> Found:
        """Return what the store knows about a key, or about an entry of a state dict: version,
        kind, bytes, place, shards, leases, creator.

        Args:
            key: which key.
            version: which version of it; None: the newest.
            timeout: seconds.

        Raises:
            KeyNotFoundError: the key does not exist.
            PartialPutError: no version of it is whole.
            VersionGoneError: the version cannot be read.
        """
        with self._watch("stat", timeout, key) as clock:
            name, number = check_key(key), check_version(version)
            found = (await self._call(clock, m.StatReply, m.Stat, name, number)).found
            clock.version = found.version
            return found

    async def status(self, *, timeout: float | None = None) -> StatusReport:
        """Return a report on volumes, memory, sessions and operations. Its ``plugin_errors`` are
        those of the server's plug-ins and of this process's plug-ins. Raises only what every
        operation may raise.
        """
        with self._watch("status", timeout) as clock:
            status = (await self._call(clock, m.StatusReply, m.Status)).status
            session = self._joined.session_here()
            if session is None:
                return status
            plugin_errors = {**observers.errors(session.registry), **status.plugin_errors}
            return msgspec.structs.replace(status, plugin_errors=plugin_errors)

    async def explain(
        self, nbytes: int = 1 << 30, *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Return, for every volume, which transport would move ``nbytes`` bytes, what each
        transport bid, and why the others refused, as plain data; ``summary`` says the same in one
        line, and how to choose another.

        Raises:
            UnsupportedValueError: ``nbytes`` is not a number of bytes.
        """
        with self._watch("explain", timeout) as clock:
            check_size(nbytes)
            session = await self._joined.session(clock.left())
            clock.on_session()
            return [_explain(volume, nbytes) for volume in session.volumes]


def _checked(clock: Clock, keys: list[str]) -> list[str]:
    """Record the keys of the operation and return them, checked. Raises UnsupportedValueError if
    one of them is invalid.
    """
    clock.entries = len(keys)
    clock.key = keys[0] if keys else ""
    return [check_key(key) for key in keys]


def _key_list(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str):
        raise UnsupportedValueError("a list of keys is needed, not one str")
    return listed(keys, "a list of keys is needed")


def _explain(volume: VolumeLinks, nbytes: int) -> dict[str, Any]:
    ranking = volume.ranking
    order = ranking.order(nbytes)
    return {
        "volume": volume.info.id,
        "nbytes": nbytes,
        "chosen": order[0].spec.name if order else None,
        "inline_up_to": ranking.inline_max(),
        "forced": ranking.forced,
        "bids": [
            {
                "transport": c.spec.name,
                "latency_s": c.bid.latency_s,
                "bytes_per_s": c.bid.bytes_per_s,
                "cost_s": c.cost_s(nbytes),
                "preferred": c.preferred,
                "reason": c.bid.reason,
                "route": volume.route(c.spec.name),
            }
            for c in order
        ],
        "refusals": ranking.refusals,
        "summary": ranking.summary(nbytes),
    }
