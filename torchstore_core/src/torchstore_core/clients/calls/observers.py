"""Observer plug-ins: told of every operation that has ended, whatever they do. Torch-free."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable

from torchstore_core.contracts.observer import Operation
from torchstore_core.errors import PluginError
from torchstore_core.plugins.registry import OBSERVERS, Registry

__all__ = ["errors", "watch"]

log = logging.getLogger(__name__)

# Of this process, which sees an observer through every store it joins, and whenever it joins one.
_said: set[str] = set()
_failed: dict[str, int] = {}
_first: dict[str, str] = {}


def watch(registry: Registry) -> Callable[[Operation], None] | None:
    """What is to be called with each operation that has ended; None: nobody watches.

    It raises nothing but KeyboardInterrupt, which is the user's, wherever it comes up. What an
    observer raises is logged once, and counted. One that does not load is logged, once.
    """
    observers = registry.observers()
    for name, why in registry.left_out(OBSERVERS).items():
        if name not in registry.block and why not in _said:
            _said.add(why)
            log.warning(
                "%s. It observes nothing: repair its package, uninstall it, or block it "
                "(TORCHSTORE_BLOCK=%s)",
                why,
                name,
            )
    if not observers:
        return None

    def observe(operation: Operation) -> None:
        for name, hook in observers.items():
            try:
                for result in hook(operation=operation):
                    _refuse_unfinished(result)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - foreign code, of whom nobody waits
                _failure(name, error)

    return observe


def errors(registry: Registry) -> dict[str, str]:
    """``"group:name"`` to what is wrong, of plug-ins that do not load here and those of its
    observers that have failed in this process.
    """
    observers = registry.observers()
    failed = {
        f"{OBSERVERS}:{name}": f"it has failed {count} times, first with {_first[name]}"
        for name, count in _failed.items()
        if name in observers
    }
    return {**registry.errors(), **failed}


def _failure(name: str, error: BaseException) -> None:
    _failed[name] = _failed.get(name, 0) + 1
    if name in _first:
        log.debug("the observer plug-in %r failed again", name, exc_info=error)
        return
    _first[name] = repr(error)
    log.warning(
        "the observer plug-in %r failed; the operation it was told of is none the worse. It is "
        "told of the next ones, too; status() counts further failures",
        name,
        exc_info=error,
    )


def _refuse_unfinished(result: object) -> None:
    """Raises PluginError: what a hook returned has not run, and nobody would run it."""
    if inspect.iscoroutine(result):
        result.close()  # or it would be reported as never awaited, far from here
    elif not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    raise PluginError(
        f"its hook torchstore_operation returned a {type(result).__name__}, which nobody runs; it "
        "must be a plain function"
    )
