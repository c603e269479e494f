"""How the ranks of one ``initialize_spmd`` meet: through the TCPStore that a launcher provides.

Rank 0 announces a *session*, with a random id, and each rank claims its place in it. The TCPStore
may be older than these ranks, or belong to another job: sessions that dead processes have left
there are ignored, and a place that another living process holds is an error on every rank.

Values are JSON; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from torchstore_core.contracts.engine import Rendezvous
from torchstore_core.contracts.ranks import SPMDEnv
from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    from_wire,
    in_seconds,
)
from torchstore_spmd import tcp_store
from torchstore_spmd.identity import ProcessIdentity

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["TCPRendezvous"]

_FIRST_POLL_S = 0.002
_LONGEST_POLL_S = 0.05
_REPORT_S = 2.0
_CLOSE_S = 2.0
_FAILURE = "failed"
_CURRENT = "current"
_PRESENT = "present"
_CLOSED = "closed"
T = TypeVar("T")


class _FailedRank(msgspec.Struct, frozen=True):
    """The error that the first rank that failed reports to the others."""

    rank: int
    code: str
    message: str
    details: dict[str, Any] = {}


class _Announcement(msgspec.Struct, frozen=True):
    """The id of a session, and the process that is rank 0 in it."""

    session: str
    rank_0: ProcessIdentity


# Sessions in which this process has taken part, by rank. It must not join them again.
_past: set[tuple[int, str]] = set()


class TCPRendezvous(Rendezvous):
    """One session: the rendezvous of the ranks for one start of a store; made by :meth:`open`.

    Args:
        env: this rank's place in the job.
        store: a store that the ranks share, with a prefix for the keys of this session.
        deadline: by ``time.monotonic``.
        timeout: seconds from the beginning to the deadline, for messages.
    """

    def __init__(self, env: SPMDEnv, store: Store, deadline: float, timeout: float) -> None:
        self.env = env
        self.store = store
        self._deadline = deadline
        self._timeout = timeout
        self._failing = False

    @classmethod
    async def open(cls, env: SPMDEnv, store_name: str, timeout: float) -> TCPRendezvous:
        """Reach the TCPStore, which rank 0 hosts unless the launcher does, and claim a place.

        Raises:
            StoreTimeoutError: nobody answers there within ``timeout`` seconds, or rank 0 does not
                arrive.
            StoreClosedError: the store cannot be hosted, or what answers is no rendezvous store.
            ConfigurationError: another process has this rank's place.
        """
        deadline = time.monotonic() + timeout
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"torchstore/{quote(store_name, safe='')}/{quote(attempt, safe='')}"
        store = await tcp_store.reach(env, deadline, timeout)
        lobby = cls(env, tcp_store.prefixed(prefix, store), deadline, timeout)
        session = await (lobby._announce() if env.rank == 0 else lobby._await_session())
        _past.add((env.rank, session))
        made = cls(env, tcp_store.prefixed(f"{prefix}/{session}", store), deadline, timeout)
        try:
            await made._claim_place()
        except ConfigurationError as error:
            with contextlib.suppress(TorchStoreError):
                await made._tell(error)  # only who has the place closes it: rank 0 waits for that
            raise
        return made

    # ---- beginning a session --------------------------------------------------------------

    async def _announce(self) -> str:
        """Begin a session, and return its id.

        Raises:
            ConfigurationError: another living process is rank 0.
        """
        before = await self._announced()
        made = _Announcement(secrets.token_hex(8), ProcessIdentity.current())
        if before is not None and before.rank_0.is_alive and not before.rank_0.is_current:
            error = self._taken(before.rank_0)
            other = TCPRendezvous(
                self.env,
                tcp_store.prefixed(before.session, self.store),
                self._deadline,
                self._timeout,
            )
            await other.fail(error)
            raise error
        await self.publish(_CURRENT, made)
        return made.session

    async def _await_session(self) -> str:
        """Return the id of a session that this process has not been in, and whose rank 0 is alive.
        If that cannot be known, a session that seems old is accepted only after half of the time.

        Raises:
            StoreTimeoutError: rank 0 has announced none.
        """
        poll = _FIRST_POLL_S
        half = self.seconds_left() / 2
        while self.seconds_left() > 0:
            found = await self._announced()
            if found is not None and (self.env.rank, found.session) not in _past:
                alive = found.rank_0.is_alive
                late = self.seconds_left() < half
                if alive or (alive is None and (late or not await self._seems_old(found))):
                    return found.session
            await asyncio.sleep(min(poll, self.seconds_left()))
            poll = min(2 * poll, _LONGEST_POLL_S)
        raise StoreTimeoutError(
            f"rank 0 of {self.env.world_size} did not come to initialize_spmd within "
            f"{in_seconds(self._timeout)}; every rank has to call it",
            details={"missing_ranks": [0], "timeout": self._timeout},
        )

    async def _seems_old(self, found: _Announcement) -> bool:
        """Return whether a session that was begun on another host seems to be over."""
        key = f"{found.session}/{_PRESENT}/{self.env.rank}"
        holder = await self._call(lambda: self._get(key, ProcessIdentity))
        return found.rank_0.precedes_current or (holder is not None and holder.is_alive is False)

    async def _announced(self) -> _Announcement | None:
        return await self._call(lambda: self._get(_CURRENT, _Announcement))

    def _get(self, key: str, kind: type[T]) -> T | None:
        if not self.store.check([key]):
            return None
        return msgspec.json.decode(self.store.get(key), type=kind)

    async def _claim_place(self) -> None:
        """Take this rank's place in the session.

        Raises:
            ConfigurationError: another process has it, and may be alive.
        """
        key, me = f"{_PRESENT}/{self.env.rank}", ProcessIdentity.current()
        mine = msgspec.json.encode(me).decode()

        def claim() -> ProcessIdentity:
            return msgspec.json.decode(self.store.compare_set(key, "", mine), type=ProcessIdentity)

        holder = await self._call(claim)
        if holder == me:
            return
        if holder.is_alive is not False:
            raise self._taken(holder)
        await self._call(lambda: self.store.set(key, mine))  # this rank was restarted alone

    def _taken(self, holder: ProcessIdentity) -> ConfigurationError:
        return ConfigurationError(
            f"rank {self.env.rank} is there already: {holder} has that RANK at "
            f"{self.env.master_addr}:{self.env.master_port}. Another job uses this MASTER_PORT, or "
            "two processes were given the same RANK",
            details={"rank": self.env.rank, "pid": holder.pid},
        )

    # ---- the contract: see Rendezvous -----------------------------------------------------

    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    async def publish(self, key: str, value: object = None) -> None:
        encoded = msgspec.json.encode(value).decode()
        await self._call(lambda: self.store.set(key, encoded))

    async def read(self, key: str, rank: int, kind: type[T]) -> T:
        await self._until_set([key], [rank])
        raw = await self._call(lambda: self.store.get(key))
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise StoreClosedError(f"rank {rank} said something unreadable: {error}") from error

    async def all_present(self) -> None:
        await self._until_all(_PRESENT)

    async def barrier(self, name: str) -> None:
        await self.publish(f"{name}/{self.env.rank}")
        await self._until_all(name)

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_LONGEST_POLL_S))[0]:
                await self._all_set([])
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def fail(self, error: BaseException) -> None:
        if self._failing:
            return
        self._failing = True
        with contextlib.suppress(TorchStoreError):
            await self._tell(error)
            await self._close_failed()

    async def _tell(self, error: BaseException) -> None:
        """Report an error to the other ranks."""
        code, text, details = StoreClosedError.code, f"it gave up: {error!r}", {}
        if isinstance(error, TorchStoreError):
            code, text, details = error.code, str(error), error.details
        failure = msgspec.json.encode(_FailedRank(self.env.rank, code, text, details))

        def tell() -> None:
            # The first failure counts, because it causes the later ones.
            self.store.compare_set(_FAILURE, "", failure.decode())

        self._deadline = time.monotonic() + _REPORT_S
        await self._call(tell)

    # ---- ending ---------------------------------------------------------------------------

    async def close(self) -> None:
        """End the session, on every rank. A rank that hosts the store waits for the others."""
        if self.env.rank != 0:
            await self.publish(f"{_CLOSED}/{self.env.rank}")
        elif not tcp_store.launcher_hosts(self.env):
            await self._until_closed(range(1, self.env.world_size))

    async def _close_failed(self) -> None:
        """End a failed session, in which some ranks may not have arrived."""
        if self.env.rank != 0 or tcp_store.launcher_hosts(self.env):
            await self.close()
            return
        others = range(1, self.env.world_size)
        await self._until_closed(
            await self._call(
                lambda: [rank for rank in others if self.store.check([f"{_PRESENT}/{rank}"])]
            )
        )

    async def _until_closed(self, others: Sequence[int]) -> None:
        """Wait for others to close, for no longer than a living rank needs for that."""
        keys = [f"{_CLOSED}/{rank}" for rank in others]
        until = time.monotonic() + _CLOSE_S
        while keys and time.monotonic() < until:
            if await self._call(lambda: self.store.check(keys)):
                return
            await asyncio.sleep(_FIRST_POLL_S)

    # ---- inside ---------------------------------------------------------------------------

    async def _until_all(self, name: str) -> None:
        ranks = range(self.env.world_size)
        await self._until_set([f"{name}/{rank}" for rank in ranks], ranks)

    async def _until_set(self, keys: list[str], ranks: Sequence[int]) -> None:
        """Wait until all keys are set, each by the rank at the same index."""
        poll = _FIRST_POLL_S
        while not await self._all_set(keys):
            if self.seconds_left() <= 0:
                raise await self._call(lambda: self._late(keys, ranks))
            await asyncio.sleep(min(poll, self.seconds_left()))
            poll = min(2 * poll, _LONGEST_POLL_S)

    def _late(self, keys: list[str], ranks: Sequence[int]) -> StoreTimeoutError:
        missing = [
            rank for key, rank in zip(keys, ranks, strict=True) if not self.store.check([key])
        ]
        present = {rank: f"{_PRESENT}/{rank}" for rank in range(self.env.world_size)}
        if not self.store.check(list(present.values())):
            # The ranks that are waited for may themselves be waiting for these.
            missing = [rank for rank, key in present.items() if not self.store.check([key])]
            what = "did not come to initialize_spmd"
            do = "every rank has to call it"
        else:
            what = "came to initialize_spmd but did not get ready"
            do = "it has died, or needs a longer timeout"
        return StoreTimeoutError(
            f"{_named(missing)} of {self.env.world_size} {what} within "
            f"{in_seconds(self._timeout)}; {do}",
            details={"missing_ranks": missing, "timeout": self._timeout},
        )

    async def _all_set(self, keys: list[str]) -> bool:
        """Return whether all keys are set. Raises the error with which another rank has failed."""
        found = await self._call(lambda: self._look(keys))
        if isinstance(found, _FailedRank):
            self._failing = True  # the rank that failed first has told all others
            await self._close_failed()
            text = f"rank {found.rank}: {found.message}"
            raise from_wire(found.code, text, None, found.details)
        return found

    def _look(self, keys: list[str]) -> bool | _FailedRank:
        if self.store.check([_FAILURE]):
            return msgspec.json.decode(self.store.get(_FAILURE), type=_FailedRank)
        return bool(not keys or self.store.check(keys))

    async def _call(self, call: Callable[[], T]) -> T:
        # A little longer than the deadline, so that a time-out can still say who is missing.
        until = max(self._deadline, time.monotonic() + _REPORT_S)
        gone = f"the rendezvous store at {self.env.master_addr}:{self.env.master_port} is gone"
        return await tcp_store.in_thread(call, until, self._timeout, f"{gone}, or hangs", gone)


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
