"""What all tests of the transport kit share: how they get a volume, run work, and fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from importlib import metadata
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar

import pytest

from torchstore_core.contracts.transport import Link, Refusal, TransportSpec
from torchstore_core.errors import PluginError, TransportError
from torchstore_core.machine.tasks import call_from_thread
from torchstore_core.plugins.registry import load_class
from torchstore_core.testing import leftovers
from torchstore_core.testing.timers import ends_within
from torchstore_core.testing.transports.ends.endpoints import SEGMENT, Endpoints
from torchstore_core.testing.transports.ends.hanging import hanging_call
from torchstore_core.testing.transports.ends.host import Plugin
from torchstore_core.testing.transports.ends.session import Session

__all__ = [
    "PLACES",
    "ROUNDS",
    "Ends",
    "TransportKit",
    "check",
    "check_raised",
    "fail",
    "must_refuse",
    "outcome",
    "over_a_link",
    "run",
]

T = TypeVar("T")
K = TypeVar("K", bound="TransportKit")

#: Where a server half may run: in a process of its own, or in the client's process.
PLACES = ("process", "here")
_TEST_S = 150.0
#: How often a test does what must leave nothing behind.
ROUNDS = 8
# The largest transfer may be as slow as over a slow network.
_SLOW_BYTES_PER_S = 10e6
_STRAY_S = 2.0
_shared: dict[tuple[type, str], Endpoints] = {}


def fail(what: str) -> NoReturn:
    """Fail the test, without a traceback through the kit."""
    pytest.fail(what, pytrace=False)


def check(holds: bool, what: str) -> None:
    """Fail the test unless ``holds`` is true."""
    if not holds:
        fail(what)


def run(work: Coroutine[Any, Any, T], timeout: float = _TEST_S) -> T:
    """Run a coroutine on an event loop of its own, like ``asyncio.run``, but abandon what does not
    end soon after it is cancelled. The loop is in a thread of its own, so that this returns even if
    the transport blocks it.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    failed: list[BaseException] = []

    def main() -> None:
        try:
            _complete(loop, task)
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            failed.append(error)

    thread = threading.Thread(target=main, name="kit-client", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        hangs = hanging_call(loop, thread.ident)
        call_from_thread(loop, task.cancel)
        thread.join(2 * _STRAY_S)
        fail(f"the transport took more than {timeout:g} s for this test{hangs and f': {hangs}'}")
    for error in failed:
        raise error
    return task.result()


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Run a task until it ends; then close the loop."""
    try:
        loop.run_until_complete(asyncio.wait([task]))
    finally:
        if stray := asyncio.all_tasks(loop):
            for one in stray:
                one.cancel()
            loop.run_until_complete(asyncio.wait(stray, timeout=_STRAY_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def outcome(
    work: Coroutine[Any, Any, object] | asyncio.Future[None], within: float, what: str
) -> BaseException | None:
    """Return what ``work`` raises; None if it succeeds. Fails the test if it takes too long."""
    task = asyncio.ensure_future(work)
    if not await ends_within(task, within):
        task.cancel()
        fail(f"{what} took more than {within:g} s")
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def check_raised(raised: BaseException | None, what: str) -> None:
    """Fail the test unless ``what`` has raised nothing, or a TransportError."""
    known = raised is None or isinstance(raised, TransportError)
    check(known, f"{what} raised {raised!r}, which is no TransportError")


async def must_refuse(work: Coroutine[Any, Any, object], what: str, within: float = 5.0) -> None:
    """Fail the test unless ``work`` soon raises a TransportError."""
    raised = await outcome(work, within, what)
    check(raised is not None, f"{what} was accepted")
    check_raised(raised, what)


class TransportKit:
    """The attributes and helpers of :class:`torchstore_core.testing.TransportTests`.

    Attributes:
        name: the transport's entry-point name.
        entry: the value of the entry point (``"my_package.plugin"``); None: the value that the
            installed package declares.
        hosting: ``"module:Class"`` of a subclass of ``transports.ends.host.Hosting``, for a server
            half that needs more than a volume around it.
        environment: environment variables of the processes of server halves and clients.
        light_halves: whether the halves need no library, so that the hook's module may import them.
        large_bytes: the size of the largest transfer.
        segment_bytes: the size of the volume's first segment; the second one is 64 MiB larger.
        gone_within: seconds after the end of a link within which its resources must be gone.
        crosses_hosts: whether the transport is tested between network namespaces; None: test it if
            it bids for a volume on another host.
        chooses_address: whether its library can be told at which interface to listen, but chooses
            the address there itself.
        stores: whether the transport works in a store that any process can start; otherwise the
            tests with a store are skipped.
        store_arguments: arguments of ``initialize`` for the tests with a store.
    """

    name: ClassVar[str] = ""
    entry: ClassVar[str | None] = None
    hosting: ClassVar[str | None] = None
    environment: ClassVar[dict[str, str]] = {}
    light_halves: ClassVar[bool] = False
    large_bytes: ClassVar[int] = 136 << 20
    segment_bytes: ClassVar[int] = SEGMENT
    gone_within: ClassVar[float] = 5.0
    crosses_hosts: ClassVar[bool | None] = None
    chooses_address: ClassVar[bool] = False
    stores: ClassVar[bool] = True
    store_arguments: ClassVar[dict[str, Any]] = {}

    def endpoints(self, place: str) -> Endpoints:
        """Return a new volume that serves the transport, at one of :data:`PLACES`.

        Override it for a server half that cannot be started in this way.
        """
        return Endpoints(
            self.plugin(),
            here=place == "here",
            hosting=self.hosting,
            environment=self.environment,
            nbytes=self.segment_bytes,
        )

    def plugin(self) -> Plugin:
        """Return the transport's entry point."""
        if not self.name:
            fail(f"{type(self).__name__} must have the transport's entry-point name as `name`")
        return Plugin(self.name, self.entry if self.entry is not None else _installed(self.name))

    def spec(self) -> TransportSpec:
        """Return the spec that the transport's hook returns."""
        try:
            return self.plugin().spec()
        except PluginError as error:
            fail(f"the transport does not load: {error}")

    # ---- volumes --------------------------------------------------------------------------

    @classmethod
    def teardown_class(cls) -> None:
        """Close the volumes that tests of this class have shared."""
        for key in [key for key in _shared if key[0] is cls]:
            _shared.pop(key).close()

    def at(self, place: str) -> Endpoints:
        """Return the shared volume at ``place``; skip the test if the transport refuses it."""
        found, refusal = self._at(place)
        if refusal:
            pytest.skip(f"server half in {_words(place)}: {refusal}")
        return found

    def anywhere(self) -> Endpoints:
        """Return the shared volume in another process, or in this one if that is refused."""
        found, refusal = self._at(PLACES[0])
        return found if not refusal else self.at(PLACES[1])

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Endpoints]:
        """Yield a volume for this test only, in another process unless the transport refuses it."""
        _, refusal = self._at(PLACES[0])
        made = self._made(PLACES[1] if refusal else PLACES[0])
        try:
            yield made
        finally:
            made.close()

    @contextlib.contextmanager
    def apart(self) -> Iterator[Endpoints]:
        """Yield a volume for this test only, in another process, which the test may kill."""
        self.at(PLACES[0])
        with self.fresh() as made:
            yield made

    def _made(self, place: str) -> Endpoints:
        try:
            return self.endpoints(place)
        except PluginError as error:
            fail(f"the server half does not load: {error}")

    def _at(self, place: str) -> tuple[Endpoints, str]:
        spec = self.spec()
        if spec.in_band:
            pytest.skip(f"{self.name} is in-band: it has no halves")
        unusable = spec.probe() if spec.probe is not None else None
        if unusable is not None:
            pytest.skip(f"this host cannot use it: {unusable}")
        key = type(self), place
        if key not in _shared:
            _shared[key] = self._made(place)
        found = _shared[key]
        if found.refusal:
            fail(f"its server half does not serve in {_words(place)}: {found.refusal}")
        bid = spec.bid(found.session().context)
        return found, bid.reason if isinstance(bid, Refusal) else ""

    # ---- transfers ------------------------------------------------------------------------

    def link_class(self) -> type[Link]:
        """Return the class of the client half."""
        cls: type[Link] = load_class(str(self.spec().client))
        return cls

    def must_leave_nothing(
        self,
        endpoints: Endpoints,
        rounds: Callable[[int], None],
        what: str,
        count: int = ROUNDS,
        *,
        first: int = 2,
    ) -> None:
        """Fail the test if so many rounds leave resources behind, which the first ones did not."""
        rounds(first)
        left = leftovers.left_by(
            lambda: rounds(count), lambda: _held(endpoints), ROUNDS, self.gone_within
        )
        if any(line.startswith("threads of this process") for line in left):
            names = Counter(thread.name for thread in threading.enumerate())
            left.append(
                "its threads are " + ", ".join(f"{n} {name!r}" for name, n in names.items())
            )
        check(not left, f"{count} {what} left this behind: {'; '.join(left)}")

    def with_link(
        self, endpoints: Endpoints, work: Callable[[Session, Link], Coroutine[Any, Any, T]]
    ) -> T:
        """Run ``work`` on a new event loop, with a new client and its link."""

        async def main() -> T:
            async with endpoints.session() as session:
                return await work(session, await session.connect())

        return run(main(), _TEST_S + self.large_bytes / _SLOW_BYTES_PER_S)


class Ends(NamedTuple):
    """A volume, a new client of it, and the client's link."""

    volume: Endpoints
    session: Session
    link: Link


def over_a_link(
    where: Literal["anywhere", "process", "fresh", "apart"] = "anywhere",
) -> Callable[[Callable[[K, Ends], Coroutine[Any, Any, None]]], Callable[[K], None]]:
    """Make a test of a coroutine that moves bytes over a link.

    Args:
        where: the volume: ``"anywhere"``, or in another ``"process"``: one that tests share;
            ``"fresh"``, ``"apart"``: one of its own, see the methods of :class:`TransportKit`.
    """

    def made(work: Callable[[K, Ends], Coroutine[Any, Any, None]]) -> Callable[[K], None]:
        @functools.wraps(work)
        def test(self: K) -> None:
            with contextlib.ExitStack() as stack:
                if where in ("fresh", "apart"):
                    volume = stack.enter_context(self.fresh() if where == "fresh" else self.apart())
                else:
                    volume = self.anywhere() if where == "anywhere" else self.at(where)
                self.with_link(volume, lambda *client: work(self, Ends(volume, *client)))

        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined] # no fixture is wanted
            [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
        )
        return test

    return made


def _held(endpoints: Endpoints) -> dict[str, int]:
    """Count the resources of this process and of the server half's processes."""
    held: dict[str, int] = {}
    for pid in (os.getpid(), *endpoints.processes()):
        whose = "this process" if pid == os.getpid() else "the server half"
        for what, count in leftovers.held_by(pid).items():
            held[f"{what} of {whose}"] = held.get(f"{what} of {whose}", 0) + count
    below = {pid for pid, _ in leftovers.descendants(os.getpid())}
    held["child processes"] = len(below)
    return held


def _words(place: str) -> str:
    return "the client's own process" if place == "here" else "another process"


@functools.cache
def _installed(name: str) -> str:
    for entry in metadata.entry_points(group="torchstore.transports"):
        if entry.name == name:
            return entry.value
    fail(f"no installed package has an entry point {name!r} in the group torchstore.transports")
