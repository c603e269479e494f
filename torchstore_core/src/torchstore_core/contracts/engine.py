"""The engine contract: how a store spans hosts.

By itself the core stays on one host: a server with its volumes behind a Unix socket, and clients
that share memory with them. A distributed engine, which runs the processes of a job on several
hosts and carries messages between them, takes a store further. What the core needs of it:

* **A volume beside the memory of each host.** The engine runs one server
  (``server.server.Server`` with ``attached=True``) in a process of its choice. On every host that
  is to hold data it starts a ``server.memory.volume.Volume``, in any process there, and attaches
  it by ``server.remote.attached.VolumeConnection``.
* **Requests carried both ways.** Nothing of a store listens on a network. On every other host than
  the server's the engine starts a ``server.remote.relay.Relay``: a Unix socket that clients and
  volumes of that host use as if it were the server's. What they say and are told goes through an
  :class:`Uplink`, which the engine implements, as bytes that it does not look into.
* **News of deaths.** On one host the kernel tells: a socket closes, a process ends. What dies on
  another host falls silent: ``RelayServer`` gives up a relay that it has not heard for some
  seconds, and a relay calls its ``lost`` when it cannot reach the server. An engine that knows
  earlier than that says so with ``RelayServer.close_silent``.
* **Stores by name.** A job may have several stores, and any of its processes may use or end them:
  :meth:`Engine.find` and :meth:`Engine.end`.
* **Ranks on several hosts**, which a launcher such as torchrun has started, and which are in no job
  of the engine: :meth:`Engine.spmd`.

How bytes of tensors move between hosts is no part of it: that is what transports are for (see
``contracts.transport``), and an engine's package usually brings one.

An engine comes with its runtime: ``Runtime.start`` starts the server and the volumes, and the spec
of the runtime (``contracts.runtime.RuntimeSpec``) names the functions that find them again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torchstore_core.contracts.ranks import SPMDEnv
    from torchstore_core.contracts.runtime import StoreOptions

__all__ = ["MEMBER_ROLE", "Engine", "RankStore", "Rendezvous", "Uplink"]

T = TypeVar("T")

#: ``ClientFacts.role`` of a session that keeps its server running, see ``server.serving.members``.
MEMBER_ROLE = "rank"


class Uplink(Protocol):
    """A relay's way to the server: calls that reach the ``RelayServer`` there (see
    ``server.remote.relay_server``).

    The engine opens it with ``RelayServer.open``, whose token goes along with every call. The calls
    reach the server in the order in which they are made, and ``exchange`` has sent before it
    returns its awaitable. Whatever they raise ends the relay.
    """

    def exchange(self, requests: bytes) -> Awaitable[bytes]:
        """``RelayServer.exchange``: what clients say, for what is answered at once."""

    def poll(self) -> Awaitable[bytes]:
        """``RelayServer.poll``: waits for what the server says later; also the sign of life."""


class Engine(Protocol):
    """The functions of an engine.

    A ``RuntimeSpec`` has a field of the same name for each, with the function's path: so nothing of
    the engine is imported before it is called.
    """

    async def find(self, store_name: str, timeout: float | None) -> str | None:
        """The Unix socket on this host (``unix:/path``) that leads to a store of the job: the
        server's own, or that of a relay; None if the job has no such store.

        Raises:
            StoreTimeoutError: no answer within ``timeout`` seconds.
        """

    async def end(self, store_name: str, timeout: float | None) -> bool:
        """End a store of the job, whichever process started it; False if there is none.

        Raises:
            StoreTimeoutError: it has not ended within ``timeout`` seconds.
        """

    def rank(self) -> int | None:
        """Which of its kind this process is; None: unknown. Asked after :meth:`find` where neither
        RANK nor LOCAL_RANK is set; it counts as local rank.
        """

    async def spmd(self, options: StoreOptions, env: SPMDEnv, rendezvous: Rendezvous) -> RankStore:
        """Start one store for ranks on several hosts. Every rank calls this, once all of them have
        agreed on ``options``; none of them is in a job of the engine.

        The ranks are to be the ``members`` of the server, and join it afterwards: it ends with the
        last of them, and what else the engine has started ends with it.

        Args:
            env: this rank's place.
            rendezvous: of all ranks. What this raises on one rank all of them raise, for the caller
                tells them; what takes long to clean up should first call ``rendezvous.fail``.

        Raises:
            StoreTimeoutError: some rank did not come, or the store did not start, in time.
            TorchStoreError: what kept another rank from it.
        """


class RankStore(ABC):
    """What one rank has of a store that all ranks have started together.

    Attributes:
        address: the Unix socket of this host that leads to the server.
    """

    address: str

    @abstractmethod
    def joined(self) -> None:
        """This rank is a member of the server now: the store must no longer end with this rank."""

    @abstractmethod
    async def stop(self, timeout: float, *, last: bool) -> None:
        """This rank has left, or has failed to join. Idempotent.

        Args:
            timeout: seconds.
            last: it was the last member: return when everything has ended that was started.
        """


class Rendezvous(ABC):
    """Where the ranks of one ``initialize_spmd`` talk to each other.

    All methods raise ``StoreClosedError`` if the store behind it is gone. Those that wait raise
    what another rank has failed with, and ``StoreTimeoutError`` naming the ranks that are missing.
    """

    env: SPMDEnv

    @abstractmethod
    def seconds_left(self) -> float:
        """Seconds until the start counts as failed."""

    @abstractmethod
    async def publish(self, key: str, value: object = None) -> None:
        """Give all ranks a value: plain data, sent as JSON."""

    @abstractmethod
    async def read(self, key: str, rank: int, kind: type[T]) -> T:
        """Wait for the value that ``rank`` publishes under ``key``."""

    @abstractmethod
    async def all_present(self) -> None:
        """Wait until every rank has come here."""

    @abstractmethod
    async def barrier(self, name: str) -> None:
        """Wait until every rank has reached the point of that name."""

    @abstractmethod
    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled if another rank fails meanwhile."""

    @abstractmethod
    async def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one gives up. Only the first call counts; none raises."""
