"""Descriptor of the runtime ``local``: a child server process on this host."""

from __future__ import annotations

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.runtime import RuntimeSpec


def _applies(mesh: object | None) -> int | None:
    return 0 if mesh is None else None


@hookimpl
def torchstore_runtime() -> RuntimeSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return RuntimeSpec("local", "torchstore_core.runtimes.local:LocalRuntime", _applies)
