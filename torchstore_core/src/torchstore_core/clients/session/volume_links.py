"""The links to one volume: ranked, connected on first use, replaced on failure. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from torchstore_core.clients.session.links import has_window
from torchstore_core.contracts.transport import Link, LinkContext
from torchstore_core.errors import (
    PluginError,
    StoreClosedError,
    TransportError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.machine.sockets.unix import check_descriptors
from torchstore_core.machine.tasks import call_from_thread, is_cancelled, wait_ended
from torchstore_core.machine.topology import Topology
from torchstore_core.plugins.ranking import Candidate, Policy, Ranking, rank
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.wire import messages as m

log = logging.getLogger(__name__)
T = TypeVar("T")
Limit = tuple[weakref.ref[asyncio.Timeout], weakref.ref[asyncio.AbstractEventLoop]]

# The pause before a transport that was not ready is retried; it doubles up to the longest.
_FIRST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 30.0
_RETRY_TIMEOUT_S = 15.0
#: So many tensors, however small, do not ride in a message: to describe and to copy them one by one
#: takes longer than a second message, and from a window they are copied together.
MANY = 128
# A connect that is cancelled has so long to end; the contract gives it a second.
_CANCEL_S = 2.0
# A connect that had less time than this may time out without a fault of the transport.
_TOO_SHORT_S = 0.5
# Of the process and the host, and of networks.
_TEMPORARY_ERRNOS = frozenset(
    (
        *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE),
    )
)


class _Backoff:
    """A transport that was not ready or has failed, the time of its next retry, and whether that
    is under way.
    """

    __slots__ = ("candidate", "due", "failures", "retrying")

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.failures = 0
        self.retrying = False
        self.postpone()

    def postpone(self) -> None:
        """Schedule the next retry, after a longer pause."""
        self.due = time.monotonic() + min(_FIRST_BACKOFF_S * 2**self.failures, _LONGEST_BACKOFF_S)
        self.failures += 1


class _Era:
    """The time until a link is used no more: how many transfers that began in it still run, and the
    link that ended it. They, and those of earlier eras, may be on that link.
    """

    __slots__ = ("active", "closing")

    def __init__(self) -> None:
        self.active = 0
        self.closing: list[Link] = []


class VolumeLinks:
    """All links from this process to one volume.

    Args:
        info: the volume and its transport offers.
        here: the topology of this process.
        same_host: whether the volume is on this host; the caller has proven it.
        handshake: carries a request to the server half of the transport of that name.
        comes_back: whether the volume's server is started again when it dies.
        directory: where this process has found the socket of the volume's server.
    """

    def __init__(
        self,
        info: m.VolumeInfo,
        here: Topology,
        same_host: bool,
        registry: Registry,
        policy: Policy,
        handshake: Callable[[str, bytes], Awaitable[bytes]],
        *,
        comes_back: bool = False,
        directory: str = "",
    ) -> None:
        self.info = info
        self._comes_back = comes_back
        self._rank = functools.partial(_ranking, registry, policy)
        self.context = LinkContext(
            here, info.topology, same_host, offered=False, directory=directory
        )
        self._handshake = handshake
        self.ranking = self._rank(self.context, info)
        self._links: dict[str, Link] = {}
        self._loop_links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Link]] = (
            weakref.WeakKeyDictionary()
        )
        self._eras = deque([_Era()])
        self._backoffs: dict[str, _Backoff] = {}  # by name of the transport
        # Transports that have been connected: what keeps them from it later is temporary.
        self._usable: set[str] = set()
        # Transports that are connected again, but have not moved anything since.
        self._doubtful: dict[str, _Backoff] = {}
        self._retries: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
        # Reentrant: the collector may end a transfer in a thread that already holds the lock.
        self._lock = threading.RLock()
        self._told = False
        self._closed = False
        # Time limits of transfers to other processes, and their event loops; keeps neither alive.
        self._limits: set[Limit] = set()
        #: Why the volume's memory is lost for good; empty while the volume is alive.
        self.lost = info.lost

    def candidates(self, nbytes: int) -> list[Candidate]:
        """The transports to try for ``nbytes`` bytes, best first. Those that wait for a retry are
        returned only if there is no other.
        """
        order = self.ranking.order(nbytes, in_band=False)
        if order:
            return order
        waiting = [backoff.candidate for backoff in list(self._backoffs.values())]
        return [c for c in waiting if c.spec.max_bytes is None or nbytes <= c.spec.max_bytes]

    def worked(self, candidate: Candidate) -> None:
        """A transfer has ended well."""
        if self._doubtful:
            self._doubtful.pop(candidate.spec.name, None)

    def failed(self, candidate: Candidate, error: TransportError) -> None:
        """Handle a failed transfer or connect: the transport is not used for a while, and then its
        link is made anew. One that says that it cannot work from here, and never did, is dropped
        for good.

        Raises:
            TransportUnavailableError: the volume is lost. It says which one that is, so that a get
                turns to other copies, whatever ``error`` says.
        """
        if self.lost:
            raise self._unreachable(self.lost) from error
        for links in self._all_links():
            if (link := links.get(candidate.spec.name)) is not None:
                self.close_when_unused(link)
        for_good = isinstance(error, TransportUnavailableError) and not isinstance(
            error, TransportNotReadyError
        )
        if for_good and candidate.spec.name not in self._usable:
            self._drop(candidate, error)
        else:  # nobody has to know of a server that is just being started again
            expected = self._comes_back and "died" in error.details
            self._back_off(candidate, error, quietly=expected)

    def close_when_unused(self, link: Link) -> None:
        """Use a link no more. It is closed when all transfers that run now have ended: another may
        be on it.
        """
        with self._lock:
            for links in self._all_links():
                for name in [name for name, one in links.items() if one is link]:
                    del links[name]
                    self._eras[-1].closing.append(link)
                    self._eras.append(_Era())
        self._close_if_idle()

    def unreachable_error(self, nbytes: int, last: TransportError | None) -> TransportError:
        """Return the error for when no candidate could move the bytes.

        It is a TransportNotReadyError if a later attempt may succeed. ``details["volume"]`` is the
        index of the volume.
        """
        if isinstance(last, TransportNotReadyError):
            return TransportNotReadyError(
                f"volume {self.info.id} cannot be reached at this moment: {last.message}",
                details={**last.details, "volume": self.info.index},
            )
        none_left = self.ranking.unavailable(nbytes)
        return self._unreachable(none_left.message, none_left.details)

    async def until_lost(self, work: Awaitable[T], within: float) -> T:
        """Wait for a transfer to another process, but only until the volume is lost, because such a
        transfer may never end once its peer has died; and at most ``within`` seconds.

        Raises:
            TransportUnavailableError: the volume is lost.
            TransportError: the time is over.
        """
        try:
            async with asyncio.timeout(within) as limit:
                known = weakref.ref(limit), weakref.ref(asyncio.get_running_loop())
                self._limits.add(known)
                if self.lost:  # looked at only now: whoever marks it may not have seen the limit
                    limit.reschedule(0.0)
                try:
                    return await work
                finally:
                    self._limits.discard(known)
        except TimeoutError as error:
            if not limit.expired():
                raise
            if not self.lost:
                raise TransportError(f"it did not end within {within:.0f} s") from error
        raise self._unreachable(self.lost)

    def _unreachable(
        self, why: str, details: dict[str, Any] | None = None
    ) -> TransportUnavailableError:
        return TransportUnavailableError(
            f"volume {self.info.id} cannot be reached: {why}",
            details={**(details or {}), "volume": self.info.index},
        )

    async def connect_best(self, timeout: float | None = None) -> None:
        """Connect the link for large values now, so that the first of them need not wait for it.

        If that takes longer than ``timeout`` seconds, the link is connected when it is needed. A
        volume that is lost meanwhile matters only to who wants something of it.
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
                self._back_off(
                    order[0], why, quietly=timeout is not None and timeout < _TOO_SHORT_S
                )
            except TransportError as error:
                if not self.lost:
                    self.failed(order[0], error)

    def route(self, transport: str) -> str:
        """Over what a transport moves bytes: see ``Link.route``. Empty if it is not connected."""
        found = [one.route for links in self._all_links() if (one := links.get(transport))]
        return next(filter(None, found), "")

    def inline_max(self, count: int = 1, *, on_device: bool = False) -> int:
        """See ``Ranking.inline_max``. Nothing but empty values if there are ``MANY`` of them, or
        they are on devices, and this process moves their bytes. Must be called on a running event
        loop.
        """
        if self._backoffs:
            self._start_retries()
        most = self.ranking.inline_max()
        if (count >= MANY or on_device) and most > 0:
            best = self.ranking.order(most + 1)
            if best and self.copies_itself(best[0]):
                return 0
        return most

    def warm(self, segment: int, nbytes: int) -> None:
        """Fill this process's page tables for warm memory. Blocks, so not for event loops."""
        with self.in_use():
            with self._lock:
                links: list[object] = list(self._links.values())
            for link in links:
                if has_window(link):
                    link.window(segment)
                    link.prepare(segment, 0, nbytes, fresh=False)

    def renew(self, info: m.VolumeInfo) -> None:
        """The server has come back, with the same memory, and offers of this life. Links that need
        nothing of the server go on; the others fail, and are connected again.
        """
        with self._lock:
            if (info.offers, info.refused) == (self.info.offers, self.info.refused):
                return
            self.info = info
            self._backoffs.clear()
            self._doubtful.clear()
            self.ranking = self._rank(self.context, info)

    def mark_lost(self, why: str) -> None:
        """Record that the volume's memory is lost for good, and close its links as soon as no
        transfer uses them. What was mapped from it stays mapped.
        """
        self.lost = why
        for known in list(self._limits):
            limit, loop = known[0](), known[1]()
            if limit is not None and loop is not None:
                call_from_thread(loop, _expire, limit)
        self.close()

    def close(self) -> None:
        """Close all links as soon as no transfer uses them any more."""
        with self._lock:
            self._closed = True
        self._close_if_idle()

    def close_in_child(self) -> None:
        """In a forked child: close at once, because the parent's transfers do not run here."""
        self._lock = threading.RLock()
        self._closed = True
        for era in self._eras:
            for link in era.closing:
                _close(link)
        self._close_links()

    # ---- inside ---------------------------------------------------------------------------

    def copies_itself(self, candidate: Candidate) -> bool:
        """Whether this process moves the bytes of the transport's link, which then cannot hang."""
        return has_window(self.connected(candidate))

    def connected(self, candidate: Candidate) -> Link | None:
        """The link of a transport, if there is one already."""
        return self._links_here(candidate).get(candidate.spec.name)

    def _links_here(self, candidate: Candidate) -> dict[str, Link]:
        if not candidate.spec.loop_bound:
            return self._links
        with self._lock:
            return self._loop_links.setdefault(asyncio.get_running_loop(), {})

    async def connect(self, candidate: Candidate) -> Link:
        """Return the link of a transport; connect it if there is none yet."""
        spec = candidate.spec
        links = self._links_here(candidate)
        link = links.get(spec.name)
        if link is None:
            try:
                cls: type[Link] = load_class(str(spec.client))
            except PluginError as error:  # treat a broken plug-in as a failed link
                check_descriptors(f"the code of transport {spec.name!r}")
                if _is_temporary(error.__cause__):
                    raise TransportNotReadyError(error.message) from error
                raise TransportUnavailableError(error.message) from error
            try:
                offer = self.info.offers[spec.name]
                context = msgspec.structs.replace(
                    self.context,
                    offered=True,
                    offer=offer,
                    handshake=functools.partial(self._handshake, spec.name),
                )
                made = await _connected(spec.name, cls.connect(offer, context))
                if not isinstance(made, Link):
                    kind = type(made).__qualname__
                    raise TransportUnavailableError(f"it connected a {kind}, which is no Link")
            except (TransportError, StoreClosedError):
                raise
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise TransportNotReadyError("it cancelled itself while it connected") from None
            except Exception as error:
                if _is_temporary(error):
                    raise TransportNotReadyError(f"it cannot connect: {error}") from error
                raise TransportUnavailableError(f"it cannot connect: {error!r}") from error
            with self._lock:
                link = links.setdefault(spec.name, made)
                self._usable.add(spec.name)
            if link is not made:  # another loop or thread was faster
                made.close()
            elif not self._told:
                self._told = True
                log.info("volume %s: %s", self.info.id, self.ranking.summary(1 << 30))
        if self._backoffs and (backoff := self._backoffs.pop(spec.name, None)) is not None:
            backoff.retrying = False
            self._doubtful[spec.name] = backoff
            self.ranking.restore(candidate)
            log.info("transport %r to volume %s is ready now", spec.name, self.info.id)
        return link

    def _back_off(
        self, candidate: Candidate, error: TransportError, *, quietly: bool = False
    ) -> None:
        name = candidate.spec.name
        if isinstance(error, TransportNotReadyError):
            what, reason = "is not ready", "it is not ready"
        else:
            what, reason = "failed", "its link failed"
        self.ranking.drop(name, f"{reason}: {error}; it will be tried again")
        backoff = self._backoffs.get(name)
        if backoff is not None:
            if backoff.retrying:  # otherwise it is one of several transfers that failed together
                backoff.retrying = False
                backoff.postpone()
            return
        backoff = self._doubtful.pop(name, None)
        if backoff is not None:
            backoff.postpone()
            self._backoffs[name] = backoff
            log.info("transport %r to volume %s %s again: %s", name, self.info.id, what, error)
            return
        self._backoffs[name] = _Backoff(candidate)
        if quietly:
            log.debug("transport %r to volume %s: %s", name, self.info.id, error)
            return
        order = [c.spec.name for c in self.ranking.order(1 << 20)]
        warnings.warn(
            f"transport {name!r} to volume {self.info.id} {what}: {error}. It is tried again "
            f"every now and then; until then there is {', '.join(order) or 'nothing else'}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _start_retries(self) -> None:
        """Start to reconnect the transports whose retry is due, as tasks of this event loop."""
        now = time.monotonic()
        for backoff in list(self._backoffs.values()):
            if backoff.due <= now:
                backoff.retrying = True
                backoff.due = now + _RETRY_TIMEOUT_S  # if this loop ends first, another one retries
                task = asyncio.get_running_loop().create_task(self._retry(backoff))
                self._retries.add(task)
                task.add_done_callback(self._retries.discard)

    async def _retry(self, backoff: _Backoff) -> None:
        try:
            with self.in_use():
                await self.connect(backoff.candidate)
        except TransportError as error:
            if not self.lost:
                self.failed(backoff.candidate, error)
        except StoreClosedError:
            log.debug("volume %s: nothing is tried any more", self.info.id)

    def _drop(self, candidate: Candidate, error: TransportError) -> None:
        name = candidate.spec.name
        self._backoffs.pop(name, None)
        self._doubtful.pop(name, None)
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
        """Keep the links open while a transfer runs inside of this context manager.

        Raises:
            TransportUnavailableError: the volume is lost.
            StoreClosedError: this client was closed.
        """
        with self._lock:
            if self.lost:
                raise self._unreachable(f"it is gone ({self.lost})")
            if self._closed:
                raise StoreClosedError("this client was closed")
            era = self._eras[-1]
            era.active += 1
        try:
            yield
        finally:
            with self._lock:
                era.active -= 1
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if len(self._eras) == 1 and not self._closed:
            return
        closing: list[Link] = []
        with self._lock:
            while len(self._eras) > 1 and not self._eras[0].active:
                closing += self._eras.popleft().closing
            idle = len(self._eras) == 1 and not self._eras[0].active
        for link in closing:
            _close(link)
        if idle and self._closed:
            self._close_links()

    def _close_links(self) -> None:
        closing: list[Link] = []
        with self._lock:  # who closes the client, and who hears that the server is gone, are two
            for links in self._all_links():
                closing += links.values()
                links.clear()
        for link in closing:
            _close(link)

    def _all_links(self) -> list[dict[str, Link]]:
        with self._lock:
            return [self._links, *self._loop_links.values()]


def _ranking(
    registry: Registry, policy: Policy, context: LinkContext, info: m.VolumeInfo
) -> Ranking:
    ranking = rank(registry.transports(), context, info.offers, policy, info.refused)
    ranking.refusals.update(registry.left_out("torchstore.transports"))
    return ranking


async def _connected(name: str, connecting: Awaitable[object]) -> object:
    """Await a transport's ``connect``. If it goes on although it is cancelled, it is left behind:
    it moves no bytes, so nobody has to wait for its end. What it connects then is closed.
    """
    task = asyncio.ensure_future(connecting)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(_close_unused)
        task.cancel()
        await wait_ended(task, _CANCEL_S)
        if not task.done():
            log.warning("transport %r does not end its connect, which was cancelled", name)
        raise
    return task.result()


def _is_temporary(error: BaseException | None) -> bool:
    """Return whether a link that could not be made for this may be made later."""
    return isinstance(error, TimeoutError) or (
        isinstance(error, OSError) and error.errno in _TEMPORARY_ERRNOS
    )


def _close_unused(task: asyncio.Future[object]) -> None:
    if not task.cancelled() and task.exception() is None:
        connected = task.result()
        if isinstance(connected, Link):
            _close(connected)


def _close(link: Link) -> None:
    try:
        link.close()
    except Exception:
        log.warning("a link failed to close", exc_info=True)


def _expire(limit: asyncio.Timeout) -> None:
    """Expire the time limit now, unless it has expired or ended already."""
    with contextlib.suppress(RuntimeError):
        if not limit.expired():
            limit.reschedule(0.0)
