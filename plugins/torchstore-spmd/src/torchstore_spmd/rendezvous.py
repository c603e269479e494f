"""How the ranks of one ``initialize_spmd`` meet: through the TCPStore that a launcher provides.

Rank 0 announces a *meeting*, with a random id, and each rank claims its place in it. The store may
be older than these ranks, or of another job: what a meeting of dead processes has left there is
passed over, and a place that another living process holds is an error on every rank.

Values are JSON, nothing is pickled. Calls of a TCPStore block, and may block for ever when the
other side hangs, whatever their time-out; so each runs in a daemon thread, and the wait for it is
bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    from_wire,
    in_seconds,
)
from torchstore_spmd.claims import Who
from torchstore_spmd.env import SPMDEnv

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Meeting"]

_FIRST_POLL_S = 0.002
_LONGEST_POLL_S = 0.05
_SAY_WHY_S = 2.0
_LAST_WORDS_S = 2.0
_FAILED = "failed"
_CURRENT = "current"
T = TypeVar("T")


class _Failed(msgspec.Struct, frozen=True):
    """What the first rank that failed tells the others."""

    rank: int
    code: str
    message: str
    details: dict[str, Any] = {}


class _Announced(msgspec.Struct, frozen=True):
    """What rank 0 announces: the meeting's id, and who it is."""

    meeting: str
    who: Who


# Ranks of this process, and meetings that they have been at: they wait for the next one.
_been_at: set[tuple[int, str]] = set()
# The TCPStores that this process hosts. They stay: others may be connecting to the port already,
# for `init_process_group`, say.
_hosted: dict[tuple[int, int], Store] = {}
_lock = threading.Lock()


class Meeting:
    """The ranks of one store, this time; made by :meth:`open`.

    Args:
        env: who this is.
        store: shared by them, with keys of this meeting alone.
        deadline: by ``time.monotonic``.
        timeout: seconds from its begin to the deadline, for messages.
    """

    def __init__(self, env: SPMDEnv, store: Store, deadline: float, timeout: float) -> None:
        self.env = env
        self.store = store
        self._deadline = deadline
        self._timeout = timeout
        self._failing = False

    @classmethod
    async def open(cls, env: SPMDEnv, store_name: str, timeout: float) -> Meeting:
        """Reach the rendezvous store; rank 0 hosts it unless the launcher does.

        Raises:
            StoreTimeoutError: nobody answers there within ``timeout`` seconds, or rank 0 does not
                come.
            StoreClosedError: it cannot be hosted, or what answers is no rendezvous store.
            ConfigurationError: another process has this rank's place.
        """
        deadline = time.monotonic() + timeout
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"torchstore/{quote(store_name, safe='')}/{quote(attempt, safe='')}"
        hosts = env.rank == 0 and not _launcher_hosts(env)
        where = f"{env.master_addr}:{env.master_port}"
        if not hosts:
            await _until_somebody_listens(env, deadline, timeout)
        store = await _aside(
            lambda: _tcp_store(env, hosts, deadline - time.monotonic()),
            deadline,
            timeout,
            f"the rendezvous store at {where} did not answer within {in_seconds(timeout)}; "
            "is it one?",
            f"no rendezvous store at {where}",
        )
        lobby = cls(env, _prefixed(prefix, store), deadline, timeout)
        name = await (lobby._announce() if env.rank == 0 else lobby._next())
        _been_at.add((env.rank, name))
        meeting = cls(env, _prefixed(f"{prefix}/{name}", store), deadline, timeout)
        try:
            await meeting._claim()
        except ConfigurationError as error:
            await meeting.fail(error)
            raise
        return meeting

    # ---- coming to it ---------------------------------------------------------------------

    async def _announce(self) -> str:
        """Begin a meeting; its id.

        Raises:
            ConfigurationError: another process is rank 0, and lives.
        """
        before = await self._announced()
        made = _Announced(secrets.token_hex(8), Who.me())
        if before is not None and before.who.lives and not before.who.is_me:
            error = self._taken(before.who)
            other = Meeting(
                self.env, _prefixed(before.meeting, self.store), self._deadline, self._timeout
            )
            await other.fail(error)
            raise error
        await self.say(_CURRENT, made)
        return made.meeting

    async def _next(self) -> str:
        """The id of a meeting that this process has not been at, and that is surely not an old one:
        if that cannot be known, after half of the time.

        Raises:
            StoreTimeoutError: rank 0 has announced none.
        """
        poll = _FIRST_POLL_S
        half = self.left() / 2
        while self.left() > 0:
            found = await self._announced()
            if found is not None and (self.env.rank, found.meeting) not in _been_at:
                lives = found.who.lives
                if lives or (lives is None and (self.left() < half or not await self._old(found))):
                    return found.meeting
            await asyncio.sleep(min(poll, self.left()))
            poll = min(2 * poll, _LONGEST_POLL_S)
        raise StoreTimeoutError(
            f"rank 0 of {self.env.world_size} did not come to initialize_spmd within "
            f"{in_seconds(self._timeout)}; every rank has to call it",
            details={"missing_ranks": [0], "timeout": self._timeout},
        )

    async def _old(self, found: _Announced) -> bool:
        """Whether it seems that this meeting, begun on another host, is not for this process."""
        holder = await self._holder(f"{found.meeting}/came/{self.env.rank}")
        return found.who.long_before_me or (holder is not None and holder.lives is False)

    async def _announced(self) -> _Announced | None:
        return await self._aside(lambda: self._there(_CURRENT, _Announced))

    async def _holder(self, key: str) -> Who | None:
        return await self._aside(lambda: self._there(key, Who))

    def _there(self, key: str, kind: type[T]) -> T | None:
        if not self.store.check([key]):
            return None
        return msgspec.json.decode(self.store.get(key), type=kind)

    async def _claim(self) -> None:
        """Take this rank's place.

        Raises:
            ConfigurationError: another process has it, and may live.
        """
        key, me = f"came/{self.env.rank}", Who.me()
        mine = msgspec.json.encode(me)

        def claim() -> Who:
            return msgspec.json.decode(self.store.compare_set(key, "", mine.decode()), type=Who)

        holder = await self._aside(claim)
        if holder.nonce == me.nonce:
            return
        if holder.lives is not False:
            raise self._taken(holder)
        await self._aside(lambda: self.store.set(key, mine.decode()))  # it was restarted alone

    def _taken(self, holder: Who) -> ConfigurationError:
        return ConfigurationError(
            f"rank {self.env.rank} is there already: {holder} has that RANK at "
            f"{self.env.master_addr}:{self.env.master_port}. Another job uses this MASTER_PORT, or "
            "two processes were given the same RANK",
            details={"rank": self.env.rank, "pid": holder.pid},
        )

    def left(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._deadline - time.monotonic())

    async def say(self, key: str, value: object = None) -> None:
        """Set a key to a value of plain data, encoded as JSON.

        Raises:
            StoreTimeoutError, StoreClosedError: the rendezvous store does not answer.
        """
        encoded = msgspec.json.encode(value).decode()
        await self._aside(lambda: self.store.set(key, encoded))

    async def hear(self, key: str, rank: int, kind: type[T]) -> T:
        """The value of a key that ``rank`` says.

        Raises:
            StoreTimeoutError: it did not within the time; names the rank.
            TorchStoreError: what another rank failed with.
            StoreClosedError: the rendezvous store is gone, or what it holds is unreadable.
        """
        await self._until_said([key], [rank])
        raw = await self._aside(lambda: self.store.get(key))
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise StoreClosedError(f"rank {rank} said something unreadable: {error}") from error

    async def gather(self, what: str) -> None:
        """Wait until every rank has come to this point, ``what``; ``"came"``: to :meth:`open`.

        Raises: as :meth:`hear`; a time-out names the ranks that are missing.
        """
        if what != "came":
            await self.say(f"{what}/{self.env.rank}")
        ranks = range(self.env.world_size)
        await self._until_said([f"{what}/{rank}" for rank in ranks], ranks)

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled when another rank fails meanwhile.

        Raises: what ``work`` raises, or what the other rank failed with.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_LONGEST_POLL_S))[0]:
                await self._unless_failed([])
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def part(self) -> None:
        """The last word. A rank that hosts the store stays until the others need it no more."""
        if self.env.rank != 0:
            await self.say(f"parted/{self.env.rank}")
        elif not _launcher_hosts(self.env):
            await self._until_parted(range(1, self.env.world_size))

    async def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one does not come, if they can be told. Raises nothing.

        What is said first counts: a second call does nothing.
        """
        if self._failing:
            return
        self._failing = True
        code = error.code if isinstance(error, TorchStoreError) else StoreClosedError.code
        text = str(error) if isinstance(error, TorchStoreError) else f"it gave up: {error!r}"
        details = error.details if isinstance(error, TorchStoreError) else {}
        failed = msgspec.json.encode(_Failed(self.env.rank, code, text, details))

        def tell() -> None:
            # The first failure counts: the later ones are because of it.
            self.store.compare_set(_FAILED, "", failed.decode())

        self._deadline = time.monotonic() + _SAY_WHY_S
        with contextlib.suppress(TorchStoreError):
            await self._aside(tell)
            await self._part_failed()

    async def _part_failed(self) -> None:
        """The last word, when some may not have come."""
        if self.env.rank != 0 or _launcher_hosts(self.env):
            await self.part()
            return
        others = range(1, self.env.world_size)
        await self._until_parted(
            await self._aside(lambda: [one for one in others if self.store.check([f"came/{one}"])])
        )

    async def _until_parted(self, others: Sequence[int]) -> None:
        """Wait for the last words of others; whoever does not say them has died."""
        keys = [f"parted/{rank}" for rank in others]
        until = time.monotonic() + _LAST_WORDS_S
        while keys and time.monotonic() < until:
            if await self._aside(lambda: self.store.check(keys)):
                return
            await asyncio.sleep(_FIRST_POLL_S)

    async def _until_said(self, keys: list[str], ranks: Sequence[int]) -> None:
        poll = _FIRST_POLL_S
        while True:
            if await self._unless_failed(keys):
                return
            if self.left() <= 0:
                raise await self._aside(lambda: self._late(keys, ranks))
            await asyncio.sleep(min(poll, self.left()))
            poll = min(2 * poll, _LONGEST_POLL_S)

    def _late(self, keys: list[str], ranks: Sequence[int]) -> StoreTimeoutError:
        missing = [
            rank for key, rank in zip(keys, ranks, strict=True) if not self.store.check([key])
        ]
        came = {rank: f"came/{rank}" for rank in range(self.env.world_size)}
        if not self.store.check(list(came.values())):
            # Whoever is waited for may wait for them.
            missing = [rank for rank, key in came.items() if not self.store.check([key])]
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

    async def _unless_failed(self, keys: list[str]) -> bool:
        """Whether all keys are there. Raises what another rank failed with."""
        found = await self._aside(lambda: self._look(keys))
        if isinstance(found, _Failed):
            self._failing = True  # who failed first has told all
            await self._part_failed()
            text = f"rank {found.rank}: {found.message}"
            raise from_wire(found.code, text, None, found.details)
        return found

    def _look(self, keys: list[str]) -> bool | _Failed:
        if self.store.check([_FAILED]):
            return msgspec.json.decode(self.store.get(_FAILED), type=_Failed)
        return bool(not keys or self.store.check(keys))

    def _gone(self) -> str:
        return f"the rendezvous store at {self.env.master_addr}:{self.env.master_port} is gone"

    async def _aside(self, call: Callable[[], T]) -> T:
        # A little longer than the deadline: whoever waits in vain still learns for whom.
        until = max(self._deadline, time.monotonic() + _SAY_WHY_S)
        return await _aside(call, until, self._timeout, f"{self._gone()}, or hangs", self._gone())


async def _aside(
    call: Callable[[], T], deadline: float, timeout: float, late: str, broken: str
) -> T:
    """The result of a call that blocks, in a daemon thread: nobody waits for one that hangs.

    Args:
        deadline: by ``time.monotonic``.
        timeout: seconds from the begin of it all to the deadline, for programs.
        late: says that it is over.
        broken: says that the call raised an error of torch.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]
            else:
                done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as caught:  # noqa: BLE001 - torch raises bare RuntimeErrors; handed over
            error = caught
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            return  # the loop has closed: nobody waits any more

    threading.Thread(target=run, name="torchstore-rendezvous", daemon=True).start()
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await done
    except TimeoutError as error:
        raise StoreTimeoutError(late, details={"timeout": timeout}) from error
    except (RuntimeError, ValueError, msgspec.DecodeError) as error:
        raise StoreClosedError(f"{broken}: {str(error).splitlines()[0]}") from error


def _launcher_hosts(env: SPMDEnv) -> bool:
    """Whether torchrun's agent hosts the store at ``env``'s address."""
    environ = os.environ
    return (
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and environ.get("MASTER_ADDR") == env.master_addr
        and environ.get("MASTER_PORT") == str(env.master_port)
    )


async def _until_somebody_listens(env: SPMDEnv, deadline: float, timeout: float) -> None:
    """Else torch would write every failed attempt to standard error."""
    poll = _FIRST_POLL_S
    said: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left):
                _, writer = await asyncio.open_connection(env.master_addr, env.master_port)
        except TimeoutError:
            break
        except OSError as error:
            said = error
        else:
            writer.close()
            return
        await asyncio.sleep(min(poll, max(0.0, deadline - time.monotonic())))
        poll = min(2 * poll, _LONGEST_POLL_S)
    raise StoreTimeoutError(
        f"nobody listens at MASTER_ADDR:MASTER_PORT {env.master_addr}:{env.master_port} within "
        f"{in_seconds(timeout)}: rank 0 has not called initialize_spmd, or the address is wrong"
        + (f" ({said})" if said is not None else ""),
        details={"missing_ranks": [0], "timeout": timeout},
    )


def _tcp_store(env: SPMDEnv, hosts: bool, left: float) -> Any:
    from torch._C._distributed_c10d import TCPStore

    def connect(*, host: bool) -> Any:
        return TCPStore(
            env.master_addr,
            env.master_port,
            env.world_size,
            host,
            timeout=timedelta(seconds=max(1.0, left)),
            wait_for_workers=False,
            # `init_process_group` hosts one as well: the two share the port.
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    if not hosts:
        return connect(host=False)
    try:
        store = connect(host=True)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        return connect(host=False)  # a TCPStore of the user's own, or of another launcher
    with _lock:
        _hosted.setdefault((os.getpid(), env.master_port), store)
    return store


def _prefixed(prefix: str, store: Any) -> Store:
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
