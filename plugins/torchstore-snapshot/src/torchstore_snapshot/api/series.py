"""Snapshots beside each other in one folder, each of which stores what has changed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from torchstore_core.errors import ConfigurationError, TorchStoreError
from torchstore_snapshot.api.pending import PendingSnapshot
from torchstore_snapshot.api.snapshot import Snapshot
from torchstore_snapshot.api.stateful import AppState
from torchstore_snapshot.committing.options import NEWEST
from torchstore_snapshot.errors import SnapshotFormatError, SnapshotNotFoundError
from torchstore_snapshot.format.paths import check_file_name
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series.claims import GRACE_S
from torchstore_snapshot.series.gc import GcReport, gc
from torchstore_snapshot.series.survey import Place, newest, survey
from torchstore_snapshot.storage.opening import path_text
from torchstore_snapshot.storage.settings import using

__all__ = ["Series"]


class Series:
    """The snapshots in a folder. A take refers to the newest of them for what has not changed.

    Args:
        path: the folder, or its URL.
        keep_last: how many snapshots remain after each take of this object; None: all.
        storage_options: as for :class:`Snapshot`.

    Raises:
        ConfigurationError: an argument is invalid.

    >>> import tempfile, torch
    >>> from torchstore_snapshot import StateDict
    >>> state = {"m": StateDict(w=torch.ones(5000), step=0)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     series = Series(folder, keep_last=2)
    ...     for step in range(4):
    ...         state["m"]["step"] = step
    ...         _ = series.take(f"step-{step}", state)
    ...     series.names(), series.latest().read_object("m/step")
    (['step-2', 'step-3'], 3)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep_last: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        last: object = keep_last
        if last is not None and (type(last) is not int or last < 1):
            raise ConfigurationError(f"keep_last is an int above 0, not {last!r}")
        self.path = path_text(path)
        self.keep_last = keep_last
        self._storage_options = storage_options
        with using(storage_options):
            self._place = Place.at(self.path)

    def __repr__(self) -> str:
        return f"Series({self.path!r})"

    def names(self) -> list[str]:
        """Return the names of the snapshots, the oldest first.

        Raises:
            OSError: the storage failed.
        """
        found = survey(self._place, GRACE_S).manifests
        return sorted(found, key=lambda name: found[name].age)

    def latest(self) -> Snapshot:
        """Return the snapshot that was committed last.

        Raises:
            SnapshotNotFoundError: there is none.
        """
        found = newest(self._place)
        if found is None:
            raise SnapshotNotFoundError(
                f"there is no snapshot in {self.path!r}", details={"path": self.path}
            )
        return Snapshot(self._of(found[0]), storage_options=self._storage_options)

    def take(self, name: str, app_state: AppState, **options: Any) -> Snapshot:
        """Take the snapshot ``name``, and remove those that are not to be kept. Arguments and
        errors are those of :meth:`Snapshot.take`; ``base=None`` writes everything again, and
        without ``base`` it is the newest snapshot.

        Raises:
            ConfigurationError: ``name`` is not the name of one folder.
        """
        with Ranks(options.get("pg")).telling():
            path = self._member(name)
        taken = Snapshot.take(path, app_state, **self._with_defaults(options))
        self._tidy(options)
        return taken

    def async_take(self, name: str, app_state: AppState, **options: Any) -> PendingSnapshot:
        """Begin to take the snapshot ``name``; those that are not to be kept are removed when it is
        committed. Arguments and errors are those of :meth:`Snapshot.async_take`, and of
        :meth:`take`.
        """
        with Ranks(options.get("pg")).telling():
            path = self._member(name)
        pending = Snapshot.async_take(path, app_state, **self._with_defaults(options))
        if self.keep_last is None or _rank(options):
            return pending
        done: Future[None] = Future()
        threading.Thread(target=self._finish, args=(pending, done, options), daemon=True).start()
        return PendingSnapshot(pending._snapshot, done)

    def gc(self, *, dry_run: bool = False, grace: float | None = None) -> GcReport:
        """Remove what is not needed; see :func:`~torchstore_snapshot.gc`."""
        return gc(
            self.path,
            keep_last=self.keep_last,
            dry_run=dry_run,
            grace=grace,
            storage_options=self._storage_options,
        )

    def _of(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    def _member(self, name: str) -> str:
        """Where the snapshot of a name is: directly in the folder, or nobody would find it."""
        given: object = name
        try:
            if not isinstance(given, str):
                raise ConfigurationError(f"the name of a snapshot is a str, not {given!r}")
            return self._of(check_file_name(name, self.path))
        except SnapshotFormatError as error:
            raise ConfigurationError(
                f"{name!r} cannot be the name of a snapshot in {self.path!r}: it is to be that of "
                "one folder there, without separators",
                details={"path": self.path, "name": name},
            ) from error

    def _with_defaults(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"storage_options": self._storage_options, "base": NEWEST, **options}

    def _tidy(self, options: dict[str, Any]) -> None:
        """The snapshot is committed, whatever happens here: the next take tidies up again."""
        if self.keep_last is not None and not _rank(options):
            with contextlib.suppress(TorchStoreError, OSError):
                self.gc()

    def _finish(
        self, pending: PendingSnapshot, done: Future[None], options: dict[str, Any]
    ) -> None:
        try:
            pending.wait()
            self._tidy(options)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            done.set_exception(error)
        else:
            done.set_result(None)


def _rank(options: dict[str, Any]) -> int:
    return Ranks(options.get("pg")).rank
