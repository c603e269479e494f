"""Operations on keys: deleting, listing, waiting, and what a store says of itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchstore_core.client_side import writing
from torchstore_core.client_side.base import ClientBase
from torchstore_core.client_side.operations import Clock, cancel_wait
from torchstore_core.errors import StoreTimeoutError, UnsupportedValueError
from torchstore_core.values import ObjectRef
from torchstore_core.wire import messages as m

__all__ = ["KeyOperations", "check_min_version"]


class KeyOperations(ClientBase):
    """The part of a client that moves no values."""

    # ---- keys -----------------------------------------------------------------------------

    async def delete(self, key: str, *, timeout: float | None = None) -> None:
        """Delete a key: all its versions, unfinished ones too. Readers keep the tensors they hold.

        A state dict is deleted as a whole; its entries are no keys of their own here.

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
        """Whether a key, or an entry of a state dict, has a whole version that can be read: False
        if any of it is lost. Raises what every operation does.
        """
        writing.check_key(key)
        reply = await self._call("exists", m.Flags, m.Exists, timeout, [key])
        return reply.flags[0]

    async def keys(self, prefix: str | None = None, *, timeout: float | None = None) -> list[str]:
        """Keys that start with ``prefix`` (as ``str.startswith``), sorted; a state dict's own key
        and its entries as ``<key>/<name>``. Lost ones are among them.

        Raises:
            UnsupportedValueError: the prefix is not a str.
        """
        if not (prefix is None or isinstance(prefix, str)):
            raise UnsupportedValueError(f"a prefix is a str, not a {type(prefix).__qualname__}")
        reply = await self._call("keys", m.KeyList, m.Keys, timeout, prefix or "")
        return reply.keys

    async def versions(self, key: str, *, timeout: float | None = None) -> list[int]:
        """The versions of a key that can be read, ascending; [] if there is none.

        More than one only of a state dict that was put with ``keep=``. Raises what every
        operation does.
        """
        writing.check_key(key)
        reply = await self._call("versions", m.Committed, m.Versions, timeout, key)
        return reply.versions

    async def latest_version(self, key: str, *, timeout: float | None = None) -> int:
        """The newest version of a key that can be read; 0 if there is none. Raises what every
        operation does.
        """
        found = await self.versions(key, timeout=timeout)
        return found[-1] if found else 0

    async def wait(
        self,
        keys: str | Iterable[str],
        *,
        min_version: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, ObjectRef]:
        """Wait until every key has a whole version, of at least ``min_version``.

        Returns:
            The refs that fulfilled it, by key.

        Raises:
            StoreTimeoutError: not within ``timeout`` seconds.
            UnsupportedValueError: ``min_version`` is not an int.
        """
        names = [keys] if isinstance(keys, str) else _key_list(keys)
        for key in names:
            writing.check_key(key)
        check_min_version(min_version)
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
        with self._here() or await self._join(clock) as (_, lane):
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


def check_min_version(version: object) -> None:
    """Raises UnsupportedValueError for what is no version to wait for."""
    if version is None or (isinstance(version, int) and -(1 << 63) <= version < 1 << 63):
        return
    raise UnsupportedValueError(f"min_version is an int or None, not {version!r}")


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
        "forced": ranking.forced,
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
