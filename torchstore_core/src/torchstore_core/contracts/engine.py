"""The engine contract: how a store spans hosts.

By itself, the core stays on one host: a server with its volumes behind a Unix socket, and clients
that share memory with them. A distributed engine runs the processes of a job on several hosts and
carries messages between them; it can extend a store to these hosts. The core needs from it:

* **A volume on each host that holds data.** The engine runs one server with ``attached=True``: a
  ``server.server.Server`` in a process of its choice, or by a ``runtimes.server_process`` in one
  of its own, which can have a keeper, so that it comes back when it dies. On every host that holds
  data, the engine starts a ``server.memory.volume.Volume``, in any process there, and attaches it
  with ``server.remote.attached.VolumeConnection``. If the engine knows at which addresses the
  other hosts of the job reach that one, it tells the volume (``told``): transports then listen at
  these, unless the user has chosen others.
* **Messages in both directions.** No part of a store but its transports listens on a network. On
  every host but the server's, the engine starts a ``server.remote.relay.Relay``: a Unix socket that
  the clients and volumes of that host use as if it were the server's. Their messages go through an
  :class:`Uplink`, which the engine implements and which treats them as opaque bytes, to a
  ``server.remote.relay_server.RelayServer``: beside the server, where each connection begins a
  ``Conversation``, or elsewhere on its host, where it begins a ``server.remote.lines.Line``.
* **Detection of deaths.** On one host, the kernel reports them: a socket closes, a process ends. A
  process that dies on another host just falls silent: ``RelayServer`` gives up a relay that it has
  not heard from for some seconds, and a relay calls its ``lost`` when it cannot reach the server.
  An engine that suspects a death earlier calls ``RelayServer.close_silent``; one that knows that no
  relay can be heard for a while, whoever lives, calls ``RelayServer.suspend``.
* **Stores by name.** A job may have several stores, and any of its processes may use or end them:
  :meth:`Engine.find` and :meth:`Engine.end`.
* **Ranks on several hosts**, which a launcher such as torchrun has started, and which belong to no
  job of the engine: :meth:`Engine.spmd`.

Moving the bytes of tensors between hosts is not part of this contract: that is what transports do
(see ``contracts.transport``), and an engine's package usually includes one.

An engine comes with its runtime: ``Runtime.start`` starts the server and the volumes, and the spec
of the runtime (``contracts.runtime.RuntimeSpec``) names the functions of the engine.
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
    """A relay's connection to the server: calls that reach the ``RelayServer`` there (see
    ``server.remote.relay_server``).

    The engine opens it with ``RelayServer.open`` and passes the token that this returns in every
    call. Calls reach the server in the order in which they are made, and ``exchange`` sends its
    requests before it returns its awaitable. Any exception from a call ends the relay.
    """

    def exchange(self, requests: bytes) -> Awaitable[bytes]:
        """Call ``RelayServer.exchange``: send requests, receive replies that are ready at once."""

    def poll(self) -> Awaitable[bytes]:
        """Call ``RelayServer.poll``: wait for later replies, and show that the relay is alive."""

    @property
    def paused(self) -> bool:
        """Whether no call can return now, or could until a moment ago, for a reason of this
        process, which is shown to be alive (``RelayServer.heard``): that the server is silent means
        nothing then.
        """


class Engine(Protocol):
    """The functions of an engine.

    ``RuntimeSpec`` has a field of the same name for the path of each function, so that the engine
    is not imported before one of them is called.
    """

    async def find(self, store_name: str, timeout: float | None) -> str | None:
        """Return the address of the Unix socket on this host (``unix:/path``) that leads to a store
        of the job: the server's own, or a relay's. None if the job has no such store.

        Raises:
            StoreTimeoutError: no answer within ``timeout`` seconds.
        """

    async def end(self, store_name: str, timeout: float | None) -> bool:
        """End a store of the job, whichever process started it; return False if there is none.

        Raises:
            StoreTimeoutError: it has not ended within ``timeout`` seconds.
        """

    def rank(self) -> int | None:
        """Return the index of this process among its kind; None: unknown. Called after :meth:`find`
        if neither RANK nor LOCAL_RANK is set; the result serves as the local rank.
        """

    async def spmd(self, options: StoreOptions, env: SPMDEnv, rendezvous: Rendezvous) -> RankStore:
        """Start one store for ranks on several hosts. Every rank calls this, after all of them have
        agreed on ``options``; none of them belongs to a job of the engine.

        The ranks become the ``members`` of the server by joining it afterwards. The server ends
        with the last of them, and everything else that the engine has started ends with it.

        Args:
            env: this rank's place in the job.
            rendezvous: connects all ranks. If this function raises on one rank, its caller tells
                the other ranks, which raise the same error. An implementation that takes long to
                clean up should call ``rendezvous.fail`` first.

        Raises:
            StoreTimeoutError: a rank did not arrive, or the store did not start, in time.
            TorchStoreError: the error that kept another rank from starting.
        """


class RankStore(ABC):
    """One rank's share in a store that all ranks have started together.

    Attributes:
        address: the address of the Unix socket on this host that leads to the server.
    """

    address: str

    @abstractmethod
    def joined(self) -> None:
        """Called when this rank has become a member: the store must no longer end with the rank."""

    @abstractmethod
    async def stop(self, timeout: float, *, last: bool) -> None:
        """Called when this rank has left, or has failed to join. Idempotent.

        Args:
            timeout: the time limit, in seconds.
            last: whether the rank was the last member. If so, return only when everything that was
                started has ended.
        """


class Rendezvous(ABC):
    """Lets the ranks of one ``initialize_spmd`` communicate with each other.

    All methods raise ``StoreClosedError`` if the key-value store behind the rendezvous is gone.
    Methods that wait raise the error with which another rank has failed, or a
    ``StoreTimeoutError`` that names the missing ranks.
    """

    env: SPMDEnv

    @abstractmethod
    def seconds_left(self) -> float:
        """Return the seconds until the start counts as failed."""

    @abstractmethod
    async def publish(self, key: str, value: object = None) -> None:
        """Publish a value for all ranks: plain data, sent as JSON."""

    @abstractmethod
    async def read(self, key: str, rank: int, kind: type[T]) -> T:
        """Wait for the value that ``rank`` publishes under ``key``."""

    @abstractmethod
    async def all_present(self) -> None:
        """Wait until every rank has arrived at the rendezvous."""

    @abstractmethod
    async def barrier(self, name: str) -> None:
        """Wait until every rank has reached the barrier ``name``."""

    @abstractmethod
    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``; cancel it if another rank fails in the meantime."""

    @abstractmethod
    async def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one gives up. Later calls have no effect; none raises."""
