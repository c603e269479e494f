"""Loaded by every interpreter that the tests start: what large packages are made of is no garbage.

While torch is imported, the collector takes a fifth of the time and finds nothing; afterwards each
full collection would walk all of it, and so would those with which an interpreter ends.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

# Modules that import most of what belongs to their packages.
_LARGE = {"torch", "monarch.actor", "torchstore_core"}


class _Uncollected(SourceFileLoader):
    """Runs a module without the collector, which it leaves as it was."""

    def exec_module(self, module: ModuleType) -> None:
        enabled = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            gc.freeze()
            if enabled:
                gc.enable()


class _Large:
    """Finds each large module, once, as it would be found without this."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _LARGE:
            return None
        _LARGE.remove(name)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Uncollected(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Large)
