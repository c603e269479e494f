"""The same calls for programs that are async: ``from torchstore_snapshot.aio import Snapshot``.

Names, arguments, results and errors are those of :class:`torchstore_snapshot.Snapshot`. Calls that
take long run in a thread, so that the event loop goes on. Cancelling such a call does not stop it.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from torchstore_core.clients.calls.thread_loops import in_thread
from torchstore_core.clients.state_dicts.getting import StateDictReport
from torchstore_snapshot.api import snapshot as blocking
from torchstore_snapshot.api.pending import PendingSnapshot
from torchstore_snapshot.api.stateful import AppState
from torchstore_snapshot.api.stores import load_into_store, snapshot_store
from torchstore_snapshot.format.manifest import Entry
from torchstore_snapshot.restoring.restore import Verify

__all__ = ["Snapshot", "load_into_store", "snapshot_store"]


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
        made = cls(path)
        take = partial(blocking.Snapshot.take, path, app_state, *args, **kwargs)
        made._snapshot = await in_thread(take)
        return made

    @staticmethod
    async def async_take(
        path: str | os.PathLike[str], app_state: AppState, *args: Any, **kwargs: Any
    ) -> PendingSnapshot:
        """See :meth:`torchstore_snapshot.Snapshot.async_take`; raises the same. What it returns can
        be awaited for the (blocking) snapshot.
        """
        return await in_thread(
            partial(blocking.Snapshot.async_take, path, app_state, *args, **kwargs)
        )

    async def restore(
        self, app_state: AppState, strict: bool = True, *, verify: Verify = True
    ) -> StateDictReport:
        """See :meth:`torchstore_snapshot.Snapshot.restore`; raises the same."""
        return await in_thread(partial(self._snapshot.restore, app_state, strict, verify=verify))

    async def read_object(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`torchstore_snapshot.Snapshot.read_object`; raises the same."""
        return await in_thread(partial(self._snapshot.read_object, path, *args, **kwargs))

    async def get_manifest(self) -> dict[str, Entry]:
        """See :meth:`torchstore_snapshot.Snapshot.get_manifest`; raises the same."""
        return await in_thread(self._snapshot.get_manifest)

    async def get_state_dict_for_key(self, key: str, *, verify: bool = True) -> dict[str, Any]:
        """See :meth:`torchstore_snapshot.Snapshot.get_state_dict_for_key`; raises the same."""
        return await in_thread(partial(self._snapshot.get_state_dict_for_key, key, verify=verify))
