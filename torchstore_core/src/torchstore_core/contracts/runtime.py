"""The runtime contract: what hosts the server, and how a process finds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import msgspec

from torchstore_core.contracts.strategy import Strategy

__all__ = ["Runtime", "RuntimeSpec", "StoreOptions"]


class StoreOptions(msgspec.Struct, frozen=True):
    """The options of a store, as given to ``initialize``, as plain data.

    Args:
        store_name: the name that distinguishes several stores of one job.
        num_storage_volumes: how many volumes the store has.
        strategy: decides the placement of values; None for the default (``singleton``).
        capacity: bytes of all volumes together; None: half of the host's memory.
        prefault: bytes of memory to warm in the background; None: derived from the capacity.
        timeout: seconds to wait for the server to start.
        block: names of plug-ins that the server must not load.
        spill: the directory, or the URL, to which the server spills values, or each volume of
            another process on its host; None: nothing is spilled. A URL may have secrets.
        spill_capacity: the most bytes to spill, of all volumes together; None: as many as are free
            at the start, or 1 TiB at a URL.
        when_full: what is done when memory is full with values whose put does not say it, see
            ``contracts.when_full``.
        repair_bandwidth: the most bytes per second that the store copies by itself, see
            ``reports.bandwidths``; 0: no limit.
        keeper: whether the server is started again, with all that it had, when it dies; None: if
            the runtime can do that.
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
    repair_bandwidth: int | None = None
    keeper: bool | None = None


class Runtime(ABC):
    """A running server, as seen by the process that started it (its owner).

    Attributes:
        shared: whether the engine itself keeps track of the stores, refuses a second one of the
            same name, and lets any process of the job end a store.
        keeps: whether it can start a server again that has died, see ``StoreOptions.keeper``.
        local_address: the address for those child processes of the owner that the engine has not
            started; None: the one that :meth:`start` returned. Set by :meth:`start`.
        ranks: the rank and local rank of this process, if the runtime was given them; None: those
            of the environment (RANK, LOCAL_RANK).
        exiting: whether the store was ended because this process exits. Set by the runtime.
    """

    shared: bool = False
    keeps: bool = False
    local_address: str | None = None
    ranks: tuple[int | None, int | None] | None = None
    exiting: bool = False

    @abstractmethod
    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        """Start the controller and the volumes; return the address that clients connect to.

        Raises:
            StoreTimeoutError: the server did not start within ``options.timeout`` seconds.
            StoreClosedError: the server ended while starting; the message has the end of its
                output.
        """

    @property
    def ended(self) -> bool:
        """Whether the store that :meth:`start` started has certainly ended, for whatever reason.
        Its name is then free, and ``initialize`` calls :meth:`stop` and starts a new one. False: it
        runs or hangs, or the runtime cannot tell.
        """
        return False

    @abstractmethod
    async def stop(self, timeout: float) -> None:
        """End everything that :meth:`start` started, leaving nothing behind. Idempotent."""


class RuntimeSpec(msgspec.Struct, frozen=True):
    """The description of a runtime, returned by a plug-in's ``torchstore_runtime`` hook.

    Args:
        name: must be the same as the entry-point name.
        factory: ``"module:Class"`` of the Runtime, imported when it is chosen.
        applies: returns how well the runtime fits this process: None if it does not, otherwise a
            rank (``auto`` takes the highest). Its argument is the ``mesh`` given to ``initialize``.
        here: returns whether this process may belong to a job of the engine; must be cheap and
            import nothing. If so, the engine is asked for stores that this process did not
            initialise.
        find, end, rank, spmd: ``"module:function"`` of each function of the engine behind this
            runtime, see ``contracts.engine.Engine``; None: the engine does not have it. ``find``
            also resolves addresses ``"<name>:<store>"``.
        advise: returns advice about another package that this process may need. Its arguments are
            the names of all installed runtimes and the ``mesh``; its result is a clause for
            warnings and errors (``"for …: pip install …"``), or an empty text.
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
