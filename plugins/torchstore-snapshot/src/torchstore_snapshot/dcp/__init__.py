"""Storage for ``torch.distributed.checkpoint``: snapshots, and live stores.

>>> import tempfile, torch
>>> import torch.distributed.checkpoint as dcp
>>> from torchstore_snapshot import Snapshot
>>> state = {"model": torch.nn.Linear(2, 1).state_dict(), "step": 3}
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = dcp.save(state, storage_writer=SnapshotStorageWriter(folder), no_dist=True)
...     wanted = {"model": torch.nn.Linear(2, 1).state_dict(), "step": 0}
...     dcp.load(wanted, storage_reader=SnapshotStorageReader(folder), no_dist=True)
...     torch.equal(Snapshot(folder).read_object("model/weight"), state["model"]["weight"])
True
>>> wanted["step"]
3
"""

from __future__ import annotations

from torchstore_snapshot.dcp.reading import SnapshotStorageReader
from torchstore_snapshot.dcp.store_reading import TorchStoreReader
from torchstore_snapshot.dcp.store_writing import TorchStoreWriter
from torchstore_snapshot.dcp.writing import SnapshotStorageWriter

__all__ = [
    "SnapshotStorageReader",
    "SnapshotStorageWriter",
    "TorchStoreReader",
    "TorchStoreWriter",
]
