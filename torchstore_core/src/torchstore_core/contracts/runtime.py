"""The runtime contract: who hosts the server, and how a process finds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from torchstore_core.contracts.strategy import Strategy

if TYPE_CHECKING:
    from torchstore_core.contracts.ranks import SPMDEnv

__all__ = ["RankRuntime", "Runtime", "RuntimeSpec", "StoreOptions"]


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


class RankRuntime(Runtime):
    """One rank's part in a store that all ranks of a launcher start together.

    ``initialize_spmd`` makes one of the runtime ``spmd``. Its factory also works without an
    argument, as those of all runtimes do: then the rank's place is what the environment says.

    Args:
        env: this rank's place.
    """

    @abstractmethod
    def __init__(self, env: SPMDEnv | None = None) -> None:
        """Raises ``ConfigurationError`` if ``env`` is None and the environment is no rank's."""

    @abstractmethod
    def default_volumes(self, strategy: Strategy | None) -> int:
        """How many volumes a store of all ranks gets if nobody says it."""

    @abstractmethod
    async def withdraw(self, store_name: str, error: Exception) -> None:
        """Tell the other ranks that this one does not come because of ``error``, which happened
        before :meth:`start`. Raises nothing, and takes a few seconds at most.
        """


class RuntimeSpec(msgspec.Struct, frozen=True):
    """What a plug-in's ``torchstore_runtime`` hook returns.

    Args:
        name: must equal the entry-point name.
        factory: ``"module:Class"`` of the Runtime, imported when chosen.
        applies: how well it fits this process: None if it does not, else a rank (``auto`` takes
            the highest). Its argument is the ``mesh`` that the user gave ``initialize``.
        engine: ``"module:Class"`` of the ``contracts.engine.Engine`` behind it, if there is one. It
            finds the stores of a job, and resolves addresses ``"<name>:<store>"``.
        here: whether this process may belong to a job of that engine; cheap, imports nothing. If
            so, the engine is asked for stores that were not initialised in this process.
        spans_hosts: whether that engine implements ``start_for_ranks``.
        advise: what this process may need another package for. It is given the names of all
            installed runtimes and the ``mesh``, and returns a clause for warnings and errors
            (``"for …: pip install …"``), or an empty text.
    """

    name: str
    factory: str
    applies: Callable[[object | None], int | None]
    engine: str | None = None
    here: Callable[[], bool] | None = None
    spans_hosts: bool = False
    advise: Callable[[Collection[str], object | None], str] | None = None
