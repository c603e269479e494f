"""Descriptor of the runtime ``spmd``: one store for all ranks of a launcher."""

from __future__ import annotations

import sys
from collections.abc import Collection

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.runtime import RuntimeSpec

__all__ = ["ENGINE_PACKAGE", "torchstore_runtime"]

#: The package of an engine for several hosts. The core itself knows no engine.
ENGINE_PACKAGE = "torchstore-monarch"


def _applies(mesh: object | None) -> int | None:
    """Return None: this runtime is never chosen by itself, because every rank must ask for it."""
    return None


def _advise(installed: Collection[str], mesh: object | None) -> str:
    if mesh is not None:
        return f"for a Monarch mesh: pip install {ENGINE_PACKAGE}"
    if "monarch" in installed or "monarch" not in sys.modules:
        return ""
    return f"This process uses Monarch: for stores of its job, pip install {ENGINE_PACKAGE}"


@hookimpl
def torchstore_runtime() -> RuntimeSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return RuntimeSpec("spmd", "torchstore_spmd.runtime:SPMDRuntime", _applies, advise=_advise)
