"""The runtime contract: who hosts the server, and how a process finds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

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
        spill: directory to which the server spills values; None: it does not.
        spill_capacity: the most bytes to spill; None: as many as are free at the start.
        when_full: what is done with puts that do not say, when memory is full, see ``when_full``.
    """

    store_name: str
    num_storage_volumes: int = 1
    strategy: Strategy | None = None
    capacity: int | None = None
    prefault: int | None = None
    timeout: float = 60.0
    block: tuple[str, ...] = ()
    spill: str | None = None
    spill_capacity: int | None = None
    when_full: str | None = None


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
        here: whether this process may belong to a job of the engine; cheap, imports nothing. If so,
            the engine is asked for stores that were not initialised in this process.
        find, end, rank, spmd: ``"module:function"`` of each function of the engine behind this
            runtime, see ``contracts.engine.Engine``; None: it does not have that. ``find`` also
            resolves addresses ``"<name>:<store>"``.
        advise: what this process may need another package for. It is given the names of all
            installed runtimes and the ``mesh``, and returns a clause for warnings and errors
            (``"for …: pip install …"``), or an empty text.
    """

    name: str
    factory: str
    applies: Callable[[object | None], int | None]
    here: Callable[[], bool] | None = None
    find: str | None = None
    end: str | None = None
    rank: str | None = None
    spmd: str | None = None
    advise: Callable[[Collection[str], object | None], str] | None = None
