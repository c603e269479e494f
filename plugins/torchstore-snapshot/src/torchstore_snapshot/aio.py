"""The same calls for programs that are async: ``from torchstore_snapshot.aio import Snapshot``.

Names, arguments, results and errors are those of :mod:`torchstore_snapshot`; where a snapshot is
the result, it is one of this module, except that of awaiting what ``async_take`` returns, which is
a :class:`torchstore_snapshot.PendingSnapshot`. What blocks runs in a thread, so that the event loop
goes on. A call that is cancelled raises CancelledError when it has stopped: by then it neither
reads nor writes any tensor of the program. A take that was not committed at that moment never is; a
restore may have written to some tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torchstore_core.clients.state_dicts.getting import StateDictReport
from torchstore_snapshot.api import series as blocking_series
from torchstore_snapshot.api import snapshot as blocking
from torchstore_snapshot.api.pending import PendingSnapshot
from torchstore_snapshot.api.stateful import AppState
from torchstore_snapshot.api.stores import load_into_store, snapshot_store
from torchstore_snapshot.devices import with_streams
from torchstore_snapshot.errors import SnapshotCorruptError
from torchstore_snapshot.format.manifest import Entry, Manifest
from torchstore_snapshot.progress import Progress
from torchstore_snapshot.restoring.restore import Verify
from torchstore_snapshot.series.gc import GcReport
from torchstore_snapshot.series.gc import gc as blocking_gc
from torchstore_snapshot.stopping import in_thread as in_plain_thread

__all__ = ["Series", "Snapshot", "gc", "load_into_store", "snapshot_store"]

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Make a call in a thread, in which the current device and streams are those of this one."""
    return await in_plain_thread(with_streams(call))


class Snapshot:
    """A snapshot at a path. Arguments are those of :class:`torchstore_snapshot.Snapshot`.

    >>> import asyncio, tempfile, torch
    >>> from torchstore_snapshot import StateDict
    >>> async def main(folder):
    ...     snapshot = await Snapshot.take(folder, {"m": StateDict(w=torch.arange(3))})
    ...     return await snapshot.read_object("m/w")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    tensor([0, 1, 2])
    """

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        self._snapshot = blocking.Snapshot(path, *args, **kwargs)
        self.path = self._snapshot.path

    @classmethod
    async def take(
        cls, path: str | os.PathLike[str], app_state: AppState, *args: Any, **kwargs: Any
    ) -> Snapshot:
        """See :meth:`torchstore_snapshot.Snapshot.take`; raises the same."""
        take = partial(blocking.Snapshot.take, path, app_state, *args, **kwargs)
        return cls._of(await in_thread(take))

    @classmethod
    def _of(cls, snapshot: blocking.Snapshot) -> Snapshot:
        made = cls.__new__(cls)
        made._snapshot, made.path = snapshot, snapshot.path
        return made

    def __repr__(self) -> str:
        return repr(self._snapshot)

    @staticmethod
    async def async_take(
        path: str | os.PathLike[str], app_state: AppState, *args: Any, **kwargs: Any
    ) -> PendingSnapshot:
        """See :meth:`torchstore_snapshot.Snapshot.async_take`; raises the same. To await what it
        returns gives the blocking snapshot; ``Snapshot(pending.path)`` is one of this module.
        """
        return await in_thread(
            partial(blocking.Snapshot.async_take, path, app_state, *args, **kwargs)
        )

    async def restore(
        self,
        app_state: AppState,
        strict: bool = True,
        *,
        verify: Verify = True,
        progress: Progress = False,
    ) -> StateDictReport:
        """See :meth:`torchstore_snapshot.Snapshot.restore`; raises the same."""
        restore = self._snapshot.restore
        return await in_thread(
            partial(restore, app_state, strict, verify=verify, progress=progress)
        )

    async def read_object(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`torchstore_snapshot.Snapshot.read_object`; raises the same."""
        return await in_thread(partial(self._snapshot.read_object, path, *args, **kwargs))

    async def verify(self, *, progress: Progress = False) -> dict[str, SnapshotCorruptError]:
        """See :meth:`torchstore_snapshot.Snapshot.verify`; raises the same."""
        return await in_thread(partial(self._snapshot.verify, progress=progress))

    async def manifest(self) -> Manifest:
        """See :attr:`torchstore_snapshot.Snapshot.manifest`; raises the same."""
        return await in_thread(lambda: self._snapshot.manifest)

    async def get_manifest(self) -> dict[str, Entry]:
        """See :meth:`torchstore_snapshot.Snapshot.get_manifest`; raises the same."""
        return await in_thread(self._snapshot.get_manifest)

    async def get_state_dict_for_key(self, key: str, *, verify: bool = True) -> dict[str, Any]:
        """See :meth:`torchstore_snapshot.Snapshot.get_state_dict_for_key`; raises the same."""
        return await in_thread(partial(self._snapshot.get_state_dict_for_key, key, verify=verify))


class Series:
    """The snapshots in a folder. Arguments are those of :class:`torchstore_snapshot.Series`.

    >>> import asyncio, tempfile, torch
    >>> from torchstore_snapshot import StateDict
    >>> async def main(folder):
    ...     series = Series(folder, keep_last=1)
    ...     for step in range(2):
    ...         _ = await series.take(f"step-{step}", {"m": StateDict(w=torch.ones(3) * step)})
    ...     return await series.names(), await (await series.latest()).read_object("m/w")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    (['step-1'], tensor([1., 1., 1.]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep_last: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._series = blocking_series.Series(path, keep_last, storage_options=storage_options)
        self.path, self.keep_last = self._series.path, keep_last

    def __repr__(self) -> str:
        return repr(self._series)

    async def names(self) -> list[str]:
        """See :meth:`torchstore_snapshot.Series.names`; raises the same."""
        return await in_thread(self._series.names)

    async def latest(self) -> Snapshot:
        """See :meth:`torchstore_snapshot.Series.latest`; raises the same."""
        return Snapshot._of(await in_thread(self._series.latest))

    async def take(self, name: str, app_state: AppState, **options: Any) -> Snapshot:
        """See :meth:`torchstore_snapshot.Series.take`; raises the same."""
        take = partial(self._series.take, name, app_state, **options)
        return Snapshot._of(await in_thread(take))

    async def async_take(self, name: str, app_state: AppState, **options: Any) -> PendingSnapshot:
        """See :meth:`torchstore_snapshot.Series.async_take`; raises the same. To await what it
        returns gives the blocking snapshot; ``Snapshot(pending.path)`` is one of this module.
        """
        return await in_thread(partial(self._series.async_take, name, app_state, **options))

    async def gc(self, *, dry_run: bool = False, grace: float | None = None) -> GcReport:
        """See :meth:`torchstore_snapshot.Series.gc`; raises the same."""
        return await in_thread(partial(self._series.gc, dry_run=dry_run, grace=grace))


async def gc(
    path: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    dry_run: bool = False,
    grace: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> GcReport:
    """See :func:`torchstore_snapshot.gc`; raises the same."""
    call = partial(
        blocking_gc,
        path,
        keep_last=keep_last,
        dry_run=dry_run,
        grace=grace,
        storage_options=storage_options,
    )
    return await in_thread(call)
