"""Links to one volume: ranked, connected on first use, replaced when they fail. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torchstore_core.contracts.transport import Link, LinkContext, SupportsWindow
from torchstore_core.errors import (
    PluginError,
    StoreClosedError,
    TorchStoreError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.topology import Topology
from torchstore_core.plugins.ranking import Candidate, Policy, Ranking, rank
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.wire import messages as m

__all__ = ["VolumeLinks"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Limit = tuple[weakref.ref[asyncio.Timeout], weakref.ref[asyncio.AbstractEventLoop]]

# A transport that is not ready is left alone for so long; then twice as long, up to the longest.
_REST_S = 1.0
_LONGEST_REST_S = 30.0
_TRYING_S = 15.0
# That a caller had less time than this is no news of the transport.
_NO_NEWS_S = 0.5
_FOR_NOW = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT)
)


class _Resting:
    """A transport that was not ready, and when to try it again."""

    __slots__ = ("candidate", "due", "failures")

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.failures = 0
        self.failed()

    def failed(self) -> None:
        """Once more."""
        self.due = time.monotonic() + min(_REST_S * 2**self.failures, _LONGEST_REST_S)
        self.failures += 1


class VolumeLinks:
    """Every way from this process to one volume.

    Args:
        info: the volume and its offers.
        here: this process.
        same_host: proven by the caller.
        control: path of the Unix socket that this process reached the store by.
    """

    def __init__(
        self,
        info: m.VolumeInfo,
        here: Topology,
        same_host: bool,
        registry: Registry,
        policy: Policy,
        control: str,
    ) -> None:
        self.info = info
        self.context = LinkContext(here, info.topology, same_host, offered=False, control=control)
        self.ranking: Ranking = rank(registry.transports(), self.context, info.offers, policy)
        self.ranking.refusals.update(registry.left_out("torchstore.transports"))
        self._links: dict[str, Link] = {}
        self._loop_links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Link]] = (
            weakref.WeakKeyDictionary()
        )
        self._resting: dict[str, _Resting] = {}  # by the name of the transport
        self._retries: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
        # The collector may end a transfer at any moment, in a thread that has it already.
        self._lock = threading.RLock()
        self._active = 0
        self._closed = False
        # Of transfers to another host, and their event loops, neither of which this keeps.
        self._limits: set[Limit] = set()
        #: Why the volume's memory is gone for good; empty while it lives.
        self.lost = info.lost

    def candidates(self, nbytes: int) -> list[Candidate]:
        """Which transports to try for so many bytes, the best first: those that rest for a while
        only where nothing else is left.
        """
        order = self.ranking.order(nbytes, in_band=False)
        return order or [rested.candidate for rested in self._resting.values()]

    def failed(self, candidate: Candidate, error: TransportError) -> None:
        """A link that fails is dropped, loudly; one that cannot connect at this moment rests for a
        while. Raises the error if the volume is lost.
        """
        if self.lost:
            raise error
        if isinstance(error, TransportNotReadyError):
            self._rest(candidate, error)
        else:
            self._drop(candidate, error)

    def none_left(self, nbytes: int, last: TransportError | None) -> TransportError:
        """The error when no candidate could move them: TransportNotReadyError if it may be possible
        later. ``details["volume"]`` is the index of the volume.
        """
        if isinstance(last, TransportNotReadyError):
            return TransportNotReadyError(
                f"volume {self.info.id} cannot be reached at this moment: {last.message}",
                details={**last.details, "volume": self.info.index},
            )
        none_left = self.ranking.unavailable(nbytes)
        return self._unreachable(none_left.message, none_left.details)

    async def while_it_lives(self, work: Awaitable[T]) -> T:
        """Wait for a transfer to another host, which may never end if that has died: until then.

        Raises:
            TransportUnavailableError: the volume is lost.
        """
        try:
            async with asyncio.timeout(None) as limit:
                known = weakref.ref(limit), weakref.ref(asyncio.get_running_loop())
                self._limits.add(known)
                try:
                    return await work
                finally:
                    self._limits.discard(known)
        except TimeoutError:
            if not (self.lost and limit.expired()):
                raise
        raise self._unreachable(self.lost)

    def _unreachable(
        self, why: str, details: dict[str, Any] | None = None
    ) -> TransportUnavailableError:
        return TransportUnavailableError(
            f"volume {self.info.id} cannot be reached: {why}",
            details={**(details or {}), "volume": self.info.index},
        )

    async def connect_best(self, timeout: float | None = None) -> None:
        """Connect the link that large values will take, so that the first of them need not. In at
        most ``timeout`` seconds; then it is done when it is needed.
        """
        order = self.ranking.order(1 << 30, in_band=False)
        if order and not self.lost:
            try:
                async with asyncio.timeout(timeout) as limit:
                    await self.connect(order[0])
            except TimeoutError:
                if not limit.expired():
                    raise
                why = TransportNotReadyError("the server is slow to let it connect")
                self._rest(order[0], why, quietly=timeout is not None and timeout < _NO_NEWS_S)
            except TransportError as error:
                self.failed(order[0], error)

    def inline_max(self) -> int:
        """See ``Ranking.inline_max``. On a running event loop."""
        if self._resting:
            self._try_again()
        return self.ranking.inline_max()

    def warm(self, segment: int, nbytes: int) -> None:
        """Fill this process's page tables for warm memory. Blocks: not for an event loop."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            window: object = link
            if isinstance(window, SupportsWindow):
                with self.in_use():
                    window.window(segment)
                    window.prepare(segment, 0, nbytes, fresh=False)

    def lose(self, why: str) -> None:
        """The volume's memory is gone for good: let go of it, as soon as no transfer uses it. What
        was mapped from it stays.
        """
        self.lost = why
        for known in list(self._limits):
            limit, loop = known[0](), known[1]()
            if limit is not None and loop is not None:
                with contextlib.suppress(RuntimeError):  # that loop is closed
                    loop.call_soon_threadsafe(_expire, limit)
        self.close()

    def close(self) -> None:
        """Close all links, once no transfer uses them any more."""
        with self._lock:
            self._closed = True
        self._close_if_idle()

    def abandon(self) -> None:
        """In a forked child: no transfer of the parent's runs here, so close without waiting."""
        self._lock = threading.RLock()
        self._closed = True
        self._close_links()

    # ---- inside ---------------------------------------------------------------------------

    async def connect(self, candidate: Candidate) -> Link:
        """The link of a transport; connected, if there is none yet."""
        spec = candidate.spec
        links = self._links
        if spec.loop_bound:
            with self._lock:
                links = self._loop_links.setdefault(asyncio.get_running_loop(), {})
        link = links.get(spec.name)
        if link is None:
            try:
                cls: type[Link] = load_class(str(spec.client))
            except PluginError as error:  # a broken transport is a link that fails
                raise TransportUnavailableError(error.message) from error
            try:
                made = await cls.connect(self.info.offers[spec.name], self.context)
            except TorchStoreError:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in _FOR_NOW:
                    raise TransportNotReadyError(f"it cannot connect: {error}") from error
                raise TransportUnavailableError(f"it cannot connect: {error!r}") from error
            with self._lock:
                link = links.setdefault(spec.name, made)
            if link is not made:  # another loop was faster
                made.close()
        if self._resting and self._resting.pop(spec.name, None) is not None:
            self.ranking.restore(candidate)
            log.info("transport %r to volume %s is ready now", spec.name, self.info.id)
        return link

    def _rest(
        self, candidate: Candidate, error: TransportNotReadyError, *, quietly: bool = False
    ) -> None:
        name = candidate.spec.name
        self.ranking.drop(name, f"it is not ready and will be tried again: {error}")
        rested = self._resting.get(name)
        if rested is not None:
            rested.failed()
            return
        self._resting[name] = _Resting(candidate)
        if quietly:
            log.debug("transport %r to volume %s: %s", name, self.info.id, error)
            return
        order = [c.spec.name for c in self.ranking.order(1 << 20)]
        warnings.warn(
            f"transport {name!r} to volume {self.info.id} is not ready: {error}. It is tried again "
            f"every now and then; until then there is {', '.join(order) or 'nothing else'}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _try_again(self) -> None:
        """Connect, beside what this event loop does, what has rested for long enough."""
        now = time.monotonic()
        for rested in list(self._resting.values()):
            if rested.due <= now:
                rested.due = now + _TRYING_S  # if this loop ends meanwhile, another one has a go
                task = asyncio.get_running_loop().create_task(self._retry(rested))
                self._retries.add(task)
                task.add_done_callback(self._retries.discard)

    async def _retry(self, rested: _Resting) -> None:
        try:
            with self.in_use():
                await self.connect(rested.candidate)
        except TransportError as error:
            if not self.lost:
                self.failed(rested.candidate, error)
        except StoreClosedError:
            log.debug("volume %s: nothing is tried any more", self.info.id)

    def _drop(self, candidate: Candidate, error: TransportError) -> None:
        name = candidate.spec.name
        self._resting.pop(name, None)
        self.ranking.drop(name, f"its link failed: {error}")
        order = [c.spec.name for c in self.ranking.order(1 << 20)]
        warnings.warn(
            f"transport {name!r} to volume {self.info.id} failed and is not used any more: "
            f"{error}; what is left: {', '.join(order) or 'nothing'}",
            RuntimeWarning,
            stacklevel=2,
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a transfer runs, links are not closed.

        Raises:
            TransportUnavailableError: the volume is lost.
            StoreClosedError: this client was closed.
        """
        with self._lock:
            if self.lost:
                raise self._unreachable(f"it is gone ({self.lost})")
            if self._closed:
                raise StoreClosedError("this client was closed")
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        with self._lock:
            idle = self._closed and not self._active
        if idle:
            self._close_links()

    def _close_links(self) -> None:
        with self._lock:
            every = [self._links, *self._loop_links.values()]
        for links in every:
            while links:
                _, link = links.popitem()
                link.close()


def _expire(limit: asyncio.Timeout) -> None:
    """End what runs under it, if anything still does."""
    with contextlib.suppress(RuntimeError):
        if not limit.expired():
            limit.reschedule(0.0)
