"""The descriptor of the runtime ``agent``. Every process imports it, so it is light."""

from __future__ import annotations

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.runtime import RuntimeSpec


def _applies(mesh: object | None) -> int | None:
    """Nobody gets this runtime without asking for it: ``local`` has the rank 0."""
    return -1 if mesh is None else None


@hookimpl
def torchstore_runtime() -> RuntimeSpec:
    """What the entry point is for: the runtime of this name."""
    return RuntimeSpec("agent", "torchstore_agents.runtime:AgentRuntime", _applies)
