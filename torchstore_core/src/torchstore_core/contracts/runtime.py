"""The runtime contract: who hosts the server, and how a process finds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from torchstore_core.contracts.strategy import Strategy

__all__ = ["Runtime", "RuntimeSpec", "StoreOptions"]


class StoreOptions(msgspec.Struct, frozen=True):
    """What ``initialize`` was asked for, as plain data.

    Args:
        store_name: several stores of one job are told apart by it.
        num_storage_volumes: how many volumes.
        strategy: placement; None for the default (``singleton``).
        capacity: bytes over all volumes; None: half of the host's memory.
        prefault: bytes of pool to make warm in the background; None: chosen from capacity.
        timeout: seconds to wait for the server to come up.
        block: plug-in names that the server does not load.
    """

    store_name: str
    num_storage_volumes: int = 1
    strategy: Strategy | None = None
    capacity: int | None = None
    prefault: int | None = None
    timeout: float = 60.0
    block: tuple[str, ...] = ()


class Runtime(ABC):
    """A running server, as seen by the process that started it (its owner).

    Attributes:
        shared: the engine itself knows which stores there are, and refuses a second one of a name;
            any process of the job may end a store.
        local_address: what child processes of the owner connect to, that are not the engine's;
            None: what :meth:`start` returned. Set by :meth:`start`.
        ranks: rank and local rank of this process, if the runtime was told; None: those of the
            environment (RANK, LOCAL_RANK) count.
    """

    shared: bool = False
    local_address: str | None = None
    ranks: tuple[int | None, int | None] | None = None

    @abstractmethod
    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        """Start controller and volumes; return the address that clients connect to.

        Raises:
            StoreTimeoutError: not up within ``options.timeout`` seconds.
            StoreClosedError: the server ended while starting; the message has its last words.
        """

    @property
    def ended(self) -> bool:
        """Whether what :meth:`start` started has surely ended, for whatever reason: then the name
        is free, and ``initialize`` calls :meth:`stop` and starts anew. False: it runs, or hangs, or
        this runtime cannot tell.
        """
        return False

    @abstractmethod
    async def stop(self, timeout: float) -> None:
        """End what :meth:`start` started, leaving nothing behind. Idempotent."""


class RuntimeSpec(msgspec.Struct, frozen=True):
    """What a plug-in's ``torchstore_runtime`` hook returns.

    Args:
        name: must equal the entry-point name.
        factory: ``"module:Class"`` of the Runtime, imported when chosen.
        applies: how well it fits this process: None if it does not, else a rank (``auto`` takes
            the highest). Its argument is the ``mesh`` that the user gave ``initialize``.
        here: whether this process may belong to a job of the engine; cheap, imports nothing.
        find: ``"module:function"``, asked in such a process for a store that was not initialised
            in it: ``async (store_name, timeout) -> address`` of a Unix socket, or None if the job
            has no such store. An address ``"<name>:<store>"`` is resolved by it too.
        end: ``"module:function"``: ``async (store_name, timeout) -> bool`` ends a store of the job,
            from any process of it; False if there was none.
        rank: ``"module:function"``: ``() -> int | None``, which of its kind this process is, asked
            after ``find`` where neither RANK nor LOCAL_RANK is set; it counts as local rank.
        spmd: ``"module:function"``: how ``initialize_spmd`` starts a store over several hosts,
            called by every rank: ``async (options, env, meeting) -> (address, runtime)``.
            ``env`` is its ``ts.SPMDEnv``; through ``meeting`` (``runtimes.rendezvous.Meeting``)
            the ranks talk: ``say``, ``hear`` and ``gather`` raise what another rank has failed
            with, ``left()`` is the seconds there are. What the function raises, all ranks raise;
            before it cleans up for long it calls ``meeting.fail(error)`` itself. ``runtime`` is
            what is stopped when this rank leaves, or None. All ranks return from
            ``initialize_spmd`` once the function has returned on all.
    """

    name: str
    factory: str
    applies: Callable[[object | None], int | None]
    here: Callable[[], bool] | None = None
    find: str | None = None
    end: str | None = None
    rank: str | None = None
    spmd: str | None = None
