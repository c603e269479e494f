"""Conversions between snapshots and the folders of other libraries.

>>> import tempfile, torch
>>> from safetensors.torch import save_file
>>> from torchstore_snapshot import Snapshot
>>> with tempfile.TemporaryDirectory() as folder:
...     save_file({"w": torch.arange(3)}, f"{folder}/model.safetensors")
...     done = convert(folder, f"{folder}/snapshot")
...     Snapshot(f"{folder}/snapshot").read_object("model/w")
tensor([0, 1, 2])
>>> done.source, done.destination, done.tensors
('safetensors', 'snapshot', 1)
"""

from __future__ import annotations

from torchstore_snapshot.converting.convert import Converted, convert
from torchstore_snapshot.converting.kinds import KINDS, Kind, detect

__all__ = ["KINDS", "Converted", "Kind", "convert", "detect"]
