"""Observer plug-ins: called after every operation; their failures harm none. Torch-free."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable

from torchstore_core.contracts.observer import Operation
from torchstore_core.errors import PluginError
from torchstore_core.plugins.installed import OBSERVERS
from torchstore_core.plugins.registry import Registry

log = logging.getLogger(__name__)

# One set for the process, because it loads the same observers for every store that it joins.
_warned: set[str] = set()
_failures: dict[str, int] = {}
_first_errors: dict[str, str] = {}
# Observers that have taken longer than this, in seconds, for one operation.
_SLOW_S = 1.0
_slow: set[str] = set()


def watch(registry: Registry) -> Callable[[Operation], None] | None:
    """Return the function to call with each operation that has ended; None without observers.

    The function raises nothing but KeyboardInterrupt, which must reach the user wherever it occurs.
    What an observer raises is logged the first time, and counted; that it takes long is logged the
    first time, too. An observer that does not load is
    logged once, and so is a name, of plug-ins of any kind, that several distributions claim.
    """
    observers = registry.observers()
    for clash in registry.clashes():
        if clash not in _warned:
            _warned.add(clash)
            log.warning("%s", clash)
    for name, why in registry.left_out(OBSERVERS).items():
        if name in registry.names(OBSERVERS) and why not in _warned:
            _warned.add(why)
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
            begun = time.monotonic()
            try:
                for result in hook(operation=operation):
                    _check_finished(result)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - third-party code must not fail the call
                _record_failure(name, error)
            if (took := time.monotonic() - begun) > _SLOW_S:
                _say_slow(name, took)

    return observe


def errors(registry: Registry) -> dict[str, str]:
    """Return what is wrong, by ``"group:name"``: plug-ins that do not load in this process, and
    observers of ``registry`` that have failed in it.
    """
    observers = registry.observers()
    failed = {
        f"{OBSERVERS}:{name}": f"it has failed {count} times, first with {_first_errors[name]}"
        for name, count in _failures.items()
        if name in observers
    }
    return {**registry.errors(), **failed}


def _record_failure(name: str, error: BaseException) -> None:
    _failures[name] = _failures.get(name, 0) + 1
    if name in _first_errors:
        log.debug("the observer plug-in %r failed again", name, exc_info=error)
        return
    _first_errors[name] = repr(error)
    log.warning(
        "the observer plug-in %r failed; the operation it was told of is none the worse. It is "
        "told of the next ones, too; status() counts further failures",
        name,
        exc_info=error,
    )


def _say_slow(name: str, took: float) -> None:
    if name not in _slow:
        _slow.add(name)
        log.warning(
            "the observer plug-in %r took %.1f s; the operation that it was told of, and all else "
            "on that event loop, has waited for it. Further times are not logged",
            name,
            took,
        )


def _check_finished(result: object) -> None:
    """Raise PluginError if a hook returned a coroutine or generator, which would never run."""
    if inspect.iscoroutine(result):
        result.close()  # or Python would warn, far from here, that it was never awaited
    elif not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    raise PluginError(
        f"its hook torchstore_operation returned a {type(result).__name__}, which nobody runs; it "
        "must be a plain function"
    )
