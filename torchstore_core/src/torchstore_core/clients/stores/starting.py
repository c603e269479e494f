"""What ``initialize`` and ``initialize_spmd`` share: checks, plug-ins, joining what they start."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable

from torchstore_core.clients.calls.arguments import check_bools, check_store_name, check_timeout
from torchstore_core.clients.calls.user_warnings import warn
from torchstore_core.clients.client import Client
from torchstore_core.clients.session.handshake import running_loop
from torchstore_core.clients.stores import (
    ancestors,
    discovery,
    environment,
    leaving,
    lookup,
    table,
)
from torchstore_core.clients.stores.joined import JoinedStore
from torchstore_core.contracts.ranks import RankRuntime, SPMDEnv
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import ConfigurationError, PluginError, StoreClosedError
from torchstore_core.plugins.installed import RUNTIMES
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.plugins.strategy_data import check_transport

log = logging.getLogger(__name__)

SPMD = "spmd"
_LONGEST_NAME = 200  # the system's names of memory have 249
_NOT_IN_A_NAME = re.compile("[\0\ud800-\udfff]")


async def start(
    options: StoreOptions,
    host: Runtime,
    mesh: object | None,
    policy: Policy,
    timeout: float | None,
    allow_pickle: bool,
) -> Client:
    """Start the server, join it, and make it findable.

    Raises:
        StoreClosedError: somebody shut the store down meanwhile.
    """
    where = await host.start(options, mesh)
    store = JoinedStore(options.store_name, where, policy, timeout, allow_pickle, host)
    try:
        await store.session(timeout)
        environment.publish(options.store_name, host.local_address or where)
    except BaseException as error:
        store.close()
        await host.stop(leaving.STOP_TIMEOUT_S)
        if isinstance(error, StoreClosedError):
            raise StoreClosedError(
                f"store {options.store_name!r} was shut down while it was being initialized",
                details=error.details,
            ) from error
        raise
    table.add(store)
    return Client(store, leave=leaving.leave_opened)


async def warn_of_another(store_name: str) -> None:
    """Warn, before a store is started, if one runs that ``connect_or_initialize`` would join: then
    there will be two. An address where no store is any more is only logged.

    Raises:
        RuntimeWarning: where warnings are errors. Nothing has been started.
    """
    for where, (names_it, otherwise) in _others(store_name).items():
        if not where.startswith("unix:"):
            continue  # a job's engine knows its stores, and refuses a second one of a name
        other = await discovery.probe(where)
        if other is None:
            log.info("%s %s, where no store is any more", names_it, where)
            continue
        if other.owner_pid == os.getpid() and not table.is_known(where):
            warn(
                f"{names_it} a store that is running ({where}, process {other.pid}), which this "
                "process started before it replaced its program (as `os.execv` does). That store "
                "keeps its memory until this process ends, and this starts another one: to use "
                "the one that runs, call connect_or_initialize; to have one only, call shutdown "
                "before the program is replaced"
            )
            return
        owner = f"process {other.pid}" if other.error is None else other.error
        warn(
            f"{names_it} a store that is running ({where}, {owner}), and this starts another one, "
            "for this process and its children alone: to use the one that runs, call "
            f"connect_or_initialize; to have two, {otherwise}give another store_name"
        )
        return


def _others(store_name: str) -> dict[str, tuple[str, str]]:
    """Where a store of that name may run already, in the order in which ``connect_or_initialize``
    looks. For each address: how this process knows of it, and what the user can do about that.
    """
    found: dict[str, tuple[str, str]] = {}
    with contextlib.suppress(ConfigurationError):  # publish says it
        if (named := environment.inherited_address(store_name)) is not None:
            variable = environment.variable_of(store_name)
            found[named] = f"{variable} names", f"unset {variable} or "
        # All but children of multiprocessing were given their parent's environment: if it names no
        # store now, somebody wanted that.
        published = lookup.address_of(store_name) if ancestors.parent() is not None else None
        if published is not None:
            found.setdefault(published, ("a process that this one descends from has", ""))
    known = table.known(store_name)
    if known is not None and known.runtime is None:
        leave = f"leave that one first ({table.shutdown_call(store_name)}), or "
        joined = "this process has joined", leave
        return {known.address: found.pop(known.address, joined), **found}
    return found


def check(
    volumes: int,
    store_name: str,
    capacity: int | None,
    prefault: int | None,
    timeout: float | None,
    keeper: bool | None = None,
) -> float | None:
    """Refuse arguments that make no sense; returns the time-out as it is used.

    Raises:
        ConfigurationError: names the argument and its value; or no event loop runs the call.
    """
    running_loop()
    for name, number in (("capacity", capacity), ("prefault", prefault)):
        if number is not None and type(number) is not int:
            raise ConfigurationError(f"{name} is a whole number of bytes, not {number!r}")
    if keeper is not None:
        check_bools(keeper=keeper)
    if type(volumes) is not int or volumes < 1:
        given: object = volumes
        named = "; a name is given as store_name=" if isinstance(given, str) else ""
        raise ConfigurationError(f"num_storage_volumes is at least 1, not {volumes!r}{named}")
    check_store_name(store_name)
    nbytes = len(store_name.encode(errors="replace"))
    if nbytes > _LONGEST_NAME:
        raise ConfigurationError(f"store_name has at most {_LONGEST_NAME} bytes, not {nbytes}")
    if _NOT_IN_A_NAME.search(store_name):  # the system takes no such names
        raise ConfigurationError(
            f"store_name is text without NUL and half characters, not {store_name!r}"
        )
    if capacity is not None and capacity < 4096 * volumes:
        raise ConfigurationError(f"capacity is bytes, at least a page a volume, not {capacity!r}")
    if prefault is not None and prefault < 0:
        raise ConfigurationError(f"prefault is bytes, not {prefault!r}")
    return check_timeout(timeout, above_zero=True)


def strategy(registry: Registry, given: Strategy | str | None) -> Strategy | None:
    """The strategy that was given: of a name, the one with default fields.

    Raises:
        PluginError: an unknown or broken one.
        ConfigurationError: it forces or prefers a transport that is not installed here.
    """
    made = registry.strategy(given)() if isinstance(given, str) else given
    check_transport(made, registry)
    return made


def runtime(registry: Registry, name: str, mesh: object | None) -> Runtime:
    """The runtime of that name; of ``"auto"``, the one that fits best.

    Raises:
        PluginError: an unknown or broken one, or none that takes ``mesh``.
        ConfigurationError: the name is no str, or the one of that name does not take ``mesh``.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"runtime is a str, not {name!r}")
    if name != "auto":
        spec = registry.runtime(name)
        if mesh is not None and spec.applies(mesh) is None:
            raise ConfigurationError(
                f"the runtime {name!r} takes no mesh that is a {type(mesh).__qualname__}; leave "
                "out mesh=, or leave out runtime= and the one that takes it is found"
            )
    else:
        ranked = [(spec.applies(mesh), spec) for spec in registry.runtimes()]
        fit = [(rank, spec) for rank, spec in ranked if rank is not None]
        if not fit:
            raise PluginError(f"no installed runtime takes this mesh{_for_mesh(registry, mesh)}")
        spec = max(fit, key=lambda item: item[0])[1]
        if advice := lookup.missing_engine(registry):
            warn(f"this store is for this process and its children{advice}")
    made: Runtime = load_class(spec.factory)()
    return made


def _for_mesh(registry: Registry, mesh: object) -> str:
    """What to install for a mesh that no runtime takes, as far as that is known."""
    if advice := registry.advice(mesh):
        return f"; {advice}"
    library = type(mesh).__module__.partition(".")[0]
    if library in ("builtins", "__main__"):
        return ""
    return f"; one for those of {library} may be in a package torchstore-{library}"


def rank_runtime() -> Callable[[SPMDEnv], RankRuntime]:
    """What makes the runtime of ``initialize_spmd``.

    Raises:
        PluginError: its package is not installed, or broken.
    """
    registry = Registry()
    if SPMD not in registry.installed(RUNTIMES):
        raise PluginError(
            "initialize_spmd is in a package of its own: pip install torchstore-spmd (installed "
            f"runtimes: {', '.join(registry.installed(RUNTIMES))})"
        )
    made: Callable[[SPMDEnv], RankRuntime] = load_class(registry.runtime(SPMD).factory)
    return made
