"""Loaded by every interpreter that the tests start: what torch is made of is no garbage, and what
few of them need is imported when it is needed.

While torch is imported, the collector takes a fifth of the time and finds nothing; afterwards each
full collection would walk all of it. Another fifth are Python's kernels for tensors without memory
(``meta``), which are registered when something imports what they are made of, as DTensors do.
Without them, an operation on such a tensor raises ``NotImplementedError``.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_KERNELS = "torch._meta_registrations"
# They import each other: the kernels come first, as in torch.
_MADE_OF = {"torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store"}


class _Uncollected(SourceFileLoader):
    """Runs a module without the collector, which it leaves as it was."""

    def exec_module(self, module: ModuleType) -> None:
        enabled = gc.isenabled()
        gc.disable()
        sys.modules[_KERNELS] = ModuleType(_KERNELS)
        try:
            super().exec_module(module)
            # Generators need it, and only what is left out would do it.
            from torch._opaque_base import OpaqueBaseMeta

            module._C._set_generator_metaclass(OpaqueBaseMeta)
            sys.meta_path.insert(0, _Kernels)
        finally:
            del sys.modules[_KERNELS]
            gc.freeze()
            if enabled:
                gc.enable()


class _Torch:
    """Finds torch, once, as it would be found without this."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Uncollected(spec.loader.name, spec.loader.path)
        return spec


class _Kernels:
    """Registers the kernels before the first of what they are made of is there."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _MADE_OF and name != _KERNELS:
            return None
        sys.meta_path.remove(cls)
        importlib.import_module(_KERNELS)
        loaded = sys.modules.pop(name, None)
        return None if loaded is None else ModuleSpec(name, _Loaded(loaded))


class _Loaded:
    """Gives a module that there is by now."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Torch)
