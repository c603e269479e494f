"""Hook specifications (pluggy project name ``torchstore``).

An entry point names a module (or object) that implements one hook with :data:`hookimpl`. Hooks are
synchronous and return small descriptors; heavy libraries are imported only by the classes that the
descriptors name.

A complete transport plug-in, with the entry point
``[project.entry-points."torchstore.transports"]`` ``mine = "my_package.plugin"``::

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
    """All hooks. Each plug-in implements the hook of its entry-point group."""

    @hookspec
    def torchstore_transport(self) -> TransportSpec:  # type: ignore[empty-body]
        """Group ``torchstore.transports``: return the description of a transport."""

    @hookspec
    def torchstore_strategy(self) -> type[Strategy]:  # type: ignore[empty-body]
        """Group ``torchstore.strategies``: return the Strategy class of the entry point's name."""

    @hookspec
    def torchstore_runtime(self) -> RuntimeSpec:  # type: ignore[empty-body]
        """Group ``torchstore.runtimes``: return the description of a runtime."""

    @hookspec
    def torchstore_operation(self, operation: Operation) -> None:
        """Group ``torchstore.plugins``: called in the client when an operation has ended.

        The hook runs on the caller's event loop, so it must be quick. An exception that it raises
        is logged once, then only counted, and never passed on (except Ctrl-C). See
        ``contracts.observer`` for an example.
        """
