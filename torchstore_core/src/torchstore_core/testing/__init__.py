"""Conformance kits for plug-ins: pytest classes to subclass. They need only pytest.

>>> from torchstore_core.testing import StrategyConformance
>>> StrategyConformance.installed
True

Each kit is imported on first use, because a strategy's tests must run without torch, as servers do,
and so must the processes that the kit of transports starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchstore_core.testing.runtimes import RuntimeConformance
    from torchstore_core.testing.strategies import StrategyConformance
    from torchstore_core.testing.transports.kit import TransportTests

__all__ = ["RuntimeConformance", "StrategyConformance", "TransportTests"]

_HOMES = {
    "RuntimeConformance": "runtimes",
    "StrategyConformance": "strategies",
    "TransportTests": "transports.kit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
