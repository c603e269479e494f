"""Descriptor of the runtime ``spmd``: one server for all ranks of a launcher."""

from __future__ import annotations

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.runtime import RuntimeSpec


def _applies(mesh: object | None) -> int | None:
    """Never by itself: every rank says ``initialize_spmd``."""
    return None


@hookimpl
def torchstore_runtime() -> RuntimeSpec:
    return RuntimeSpec("spmd", "torchstore_spmd.runtime:SPMDRuntime", _applies)
