"""What a folder is. Torch-free."""

from __future__ import annotations

import os
from typing import Literal, get_args

from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.opening import open_storage

__all__ = ["DCP_METADATA", "KINDS", "TORCHSNAPSHOT_METADATA", "Kind", "detect"]

#: ``"dcp"`` is a checkpoint of ``torch.distributed.checkpoint``, ``"safetensors"`` a folder with
#: such files, as model libraries publish them.
Kind = Literal["snapshot", "dcp", "torchsnapshot", "safetensors"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DCP_METADATA = ".metadata"
TORCHSNAPSHOT_METADATA = ".snapshot_metadata"


def detect(path: str | os.PathLike[str]) -> Kind:
    """Return what is at a path or URL.

    Raises:
        SnapshotNotFoundError: nothing that could be converted.
    """
    storage: Storage = open_storage(path)
    names = {info.name for info in storage.list()}
    marks: dict[str, Kind] = {
        MANIFEST: "snapshot",
        DCP_METADATA: "dcp",
        TORCHSNAPSHOT_METADATA: "torchsnapshot",
    }
    for name, kind in marks.items():
        if name in names:
            return kind
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    raise SnapshotNotFoundError(
        f"{storage.url!r} is no snapshot, and no folder of torch.distributed.checkpoint, of "
        f"torchsnapshot or of safetensors files: it has none of {', '.join(marks)}, *.safetensors",
        details={"path": storage.url},
    )
