"""Reads the metadata of checkpoints of ``torch.distributed.checkpoint``, which are a pickle.

The unpickler knows the classes that such metadata consist of, which do nothing when they are made,
and refuses every other name. So nothing in a file can run code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from torchstore_core.clients.values.tensors import _BY_NAME
from torchstore_core.errors import UnsafeObjectError
from torchstore_snapshot.errors import SnapshotFormatError

__all__ = ["read_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in (
            "Path",
            "PosixPath",
            "PurePosixPath",
        )
    ),
    *(("torch", name) for name in _BY_NAME),
}


def _member(enumeration: Any, name: Any) -> Any:
    """What ``getattr`` does for the members of the only enumeration in metadata: some releases of
    Python pickle them as a call of it.
    """
    if enumeration is not _MEM_FORMAT_ENCODING or not isinstance(name, str):
        raise UnsafeObjectError(
            "the metadata of a checkpoint read an attribute of what is no enumeration of theirs; "
            "they are not loaded"
        )
    return _MEM_FORMAT_ENCODING[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _ALLOWED:
            raise UnsafeObjectError(
                f"the metadata of a checkpoint refer to {module}.{name}, which is not part of "
                "them; they are not loaded"
            )
        return super().find_class(module, name)


def read_metadata(data: bytes, path: str) -> Metadata:
    """Return the metadata of the checkpoint at ``path``, from the bytes of its file.

    Raises:
        UnsafeObjectError: they refer to something that metadata do not consist of.
        SnapshotFormatError: they cannot be read.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except UnsafeObjectError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to; there is no common base
        raise SnapshotFormatError(
            f"the metadata of the checkpoint {path!r} cannot be read: {error!r}",
            details={"path": path},
        ) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise SnapshotFormatError(
            f"{path!r} has no metadata of torch.distributed.checkpoint's files",
            details={"path": path},
        )
    return found
