"""An import of torch that takes as long as a test wants. Torch-free, for workers that have none."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["import_slowly"]


class _Slow(importlib.abc.Loader):
    def __init__(self, real: Any, gate: str) -> None:
        self._real, self._gate = real, gate

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        with open(self._gate, "rb") as gate:
            gate.read()
        self._real.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, gate: str) -> None:
        self._gate = gate

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Slow(spec.loader, self._gate)
        return spec


async def import_slowly(gate: str) -> bool:
    """Import torch in a thread, which waits in the middle of it from when the FIFO ``gate`` is
    opened for writing until that is closed. Whether this process had no torch yet; as long as it
    waits, this answer does not leave the process.
    """
    if "torch" in sys.modules:
        return False
    sys.meta_path.insert(0, _Finder(gate))
    importing = threading.Thread(target=importlib.import_module, args=["torch"], daemon=True)
    importing.start()
    while "torch" not in sys.modules:
        importing.join(0.01)
    return True
