"""The data files of a snapshot while it is read, and the errors for those that are damaged."""

from __future__ import annotations

from types import TracebackType

from torchstore_snapshot.errors import SnapshotCorruptError
from torchstore_snapshot.format.manifest import Manifest, Piece
from torchstore_snapshot.storage.base import Reader, Storage

__all__ = ["Files"]


class Files:
    """The data files of a snapshot, opened when they are first needed. A context manager."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._open: dict[int, Reader] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for reader in self._open.values():
            reader.close()

    @property
    def url(self) -> str:
        """Where the snapshot is."""
        return self._storage.url

    def reader(self, index: int) -> Reader:
        """Return a file.

        Raises:
            SnapshotCorruptError: it is missing, or its size is not the one in the manifest.
        """
        found = self._open.get(index)
        if found is not None:
            return found
        file = self._manifest.files[index]
        storage = self._storage.sibling(file.snapshot) if file.snapshot else self._storage
        try:
            reader = storage.open(file.name)
        except FileNotFoundError as error:
            raise self.corrupt(index, "is missing") from error
        if reader.nbytes != file.nbytes:
            reader.close()
            raise self.corrupt(index, f"has {reader.nbytes} bytes instead of {file.nbytes}")
        self._open[index] = reader
        return reader

    def corrupt(self, index: int, what: str, path: str | None = None) -> SnapshotCorruptError:
        """Return the error for a damaged file; ``path`` is the tensor concerned."""
        name = self._manifest.files[index].name
        return SnapshotCorruptError(
            f"the snapshot {self._storage.url!r} is damaged: {name!r} {what}; restore another "
            "snapshot",
            key=path,
            details={"path": self._storage.url, "file": name},
        )

    def damaged(self, piece: Piece, path: str) -> SnapshotCorruptError:
        """Return the error for a piece whose hash is wrong."""
        return self.corrupt(piece.file, f"has other bytes of {path!r} than were written", path)
