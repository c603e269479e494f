"""Hook specifications (pluggy project name ``torchstore``).

An entry point names a module (or object) that implements one hook with :data:`hookimpl`. Hooks are
synchronous and return small descriptors; heavy libraries are imported by the classes these name.

A whole transport plug-in, with the entry point ``[project.entry-points."torchstore.transports"]``
``mine = "my_package.plugin"``::

    from torchstore_core.contracts.hooks import hookimpl
    from torchstore_core.contracts.transport import Bid, TransportSpec

    @hookimpl
    def torchstore_transport() -> TransportSpec:
        return TransportSpec(
            "mine",
            bid=lambda context: Bid(50e-6, 5e9, "always"),
            client="my_package.link:MyLink",
            server="my_package.server:MyServer",
        )
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from torchstore_core.contracts.observer import Operation
    from torchstore_core.contracts.runtime import RuntimeSpec
    from torchstore_core.contracts.strategy import Strategy
    from torchstore_core.contracts.transport import TransportSpec

__all__ = ["PROJECT", "HookSpecs", "hookimpl", "hookspec"]

PROJECT = "torchstore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """All hooks. Each plug-in implements the one of its entry-point group."""

    @hookspec
    def torchstore_transport(self) -> TransportSpec:  # type: ignore[empty-body]
        """Group ``torchstore.transports``: describe one transport."""

    @hookspec
    def torchstore_strategy(self) -> type[Strategy]:  # type: ignore[empty-body]
        """Group ``torchstore.strategies``: the Strategy class of this name."""

    @hookspec
    def torchstore_runtime(self) -> RuntimeSpec:  # type: ignore[empty-body]
        """Group ``torchstore.runtimes``: describe one runtime."""

    @hookspec
    def torchstore_operation(self, operation: Operation) -> None:
        """Group ``torchstore.plugins``: called in the client after every operation ended.

        It runs on the caller's event loop: be quick. What it raises is logged once and counted,
        never passed on (but for Ctrl-C). See ``contracts.observer``, which has an example.
        """
