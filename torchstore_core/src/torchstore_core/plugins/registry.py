"""Loads installed plug-ins by name; a broken one harms no other.

The error of a plug-in that fails to load is recorded, and raised only when the plug-in is asked for
by name. The same goes for a name that two distributions claim, of which neither is used. A name of
the core's packages stays with its package, whoever else claims it, and so does one after which its
package is called; and names of observers, which nobody asks for, may be the same.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pluggy

from torchstore_core.contracts import hooks
from torchstore_core.contracts.runtime import RuntimeSpec
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.contracts.transport import TransportSpec
from torchstore_core.errors import ConfigurationError, PluginError
from torchstore_core.plugins.installed import (
    GROUPS,
    OBSERVERS,
    RUNTIMES,
    InstalledPlugin,
    installed,
)
from torchstore_core.plugins.requirements import misfit, misfit_of

if TYPE_CHECKING:
    from importlib import metadata

log = logging.getLogger(__name__)

# What the module of a plug-in must not import: servers import it, too.
_HEAVY = "torch"
_PACKAGE_PART = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")

_TRANSPORTS, _STRATEGIES = "torchstore.transports", "torchstore.strategies"
_OWN: dict[str, tuple[str, tuple[str, ...]]] = {
    _TRANSPORTS: ("torchstore-transports", ("shm", "inline", "tcp")),
    _STRATEGIES: (
        "torchstore-strategies",
        ("singleton", "local-rank", "host", "hash", "spread", "replicated"),
    ),
    RUNTIMES: ("torchstore-core", ("local",)),
}
#: Plug-ins of the core's packages, by group and name, and the package of each: for advice, and
#: because a stranger that claims such a name does not get it.
OWN_NAMES = {(group, name): package for group, (package, names) in _OWN.items() for name in names}
# Other packages are called after their plug-ins.
_NAMED_AFTER = "torchstore-"


# Functions of runtimes that have failed in this process.
_warned: set[str] = set()


def _normal(distribution: str) -> str:
    """Return the name of a distribution in the form in which names are compared.

    >>> _normal("Torchstore_Core")
    'torchstore-core'
    """
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _owner(group: str, name: str, distributions: Iterable[str]) -> str | None:
    """Return whose name it is: that of a package of the core, or else of the package that is called
    after it, if it is among these.

    >>> _owner("torchstore.transports", "shm", ["mine"])
    'torchstore-transports'
    >>> _owner("torchstore.transports", "fast-rdma", ["mine", "torchstore-fast"])
    'torchstore-fast'
    >>> _owner("torchstore.transports", "fast", ["mine", "yours"])
    """
    after = [
        one
        for one in map(_normal, distributions)
        if f"{_NAMED_AFTER}{name}-".startswith(f"{one}-") and one.startswith(_NAMED_AFTER)
    ]
    return OWN_NAMES.get((group, name)) or max(after, key=len, default=None)


def _told_apart(
    group: str, named: dict[str, list[InstalledPlugin]]
) -> dict[str, list[InstalledPlugin]]:
    """Give claimants that are not in each other's way names of their own, like ``tcp (package)``:
    all observers of one name, and strangers that claim a name which another package owns.
    """
    apart: dict[str, list[InstalledPlugin]] = {}
    for name, entries in named.items():
        owner = _owner(group, name, [entry.distribution for entry in entries])
        is_owned = any(_normal(entry.distribution) == owner for entry in entries)
        for entry in entries:
            is_stranger = is_owned and _normal(entry.distribution) != owner
            is_apart = len(entries) > 1 and (is_stranger or group == OBSERVERS)
            key = f"{name} ({entry.distribution})" if is_apart else name
            apart.setdefault(key, []).append(entry)
    return apart


def load_class(path: str) -> Any:
    """Return the object that ``"module:Name"`` names.

    Raises:
        PluginError: the object cannot be imported; the error says why.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module that exits or panics is as broken as one that raises
        why = misfit_of(path)
        text = f"cannot import {path!r}: {error!r}{'; ' if why else ''}{why}"
        raise PluginError(text) from error


def _near(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Return a hint at the known names that may have been meant; empty if none is similar.

    >>> _near(["hsh"], ["hash", "host"]), _near(["x"], ["hash"])
    ("did you mean 'hash'", '')
    """
    import difflib  # only for people who have mistyped a name

    names = list(known)
    near = [n for u in unknown for n in difflib.get_close_matches(u, names, 1)]
    return f"did you mean {' and '.join(map(repr, dict.fromkeys(near)))}" if near else ""


def _kind(group: str) -> str:
    """Return the word for the plug-ins of a group, for error messages."""
    return GROUPS[group].removeprefix("torchstore_").replace("operation", "plug-in")


class Registry:
    """The plug-ins that a process can use.

    Args:
        entry_points: the plug-ins to choose from; default: all installed ones.
        block: names of plug-ins that must not even be imported.

    >>> Registry(entry_points=[]).names("torchstore.transports")
    []
    """

    def __init__(
        self,
        entry_points: Iterable[InstalledPlugin | metadata.EntryPoint] | None = None,
        *,
        block: Sequence[str] = (),
    ) -> None:
        self.block = frozenset(block)
        self._entries: dict[str, dict[str, list[InstalledPlugin]]] = {g: {} for g in GROUPS}
        for found in installed() if entry_points is None else entry_points:
            named = self._entries.get(found.group)
            if named is None:
                continue
            entry = found if isinstance(found, InstalledPlugin) else InstalledPlugin.of(found)
            same = named.setdefault(entry.name, [])
            # One distribution found twice (editable and built metadata) is no conflict.
            if all(entry.identity != other.identity for other in same):
                same.append(entry)
        self._entries = {g: _told_apart(g, named) for g, named in self._entries.items()}
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks.HookSpecs)
        self._results: dict[tuple[str, str], Any] = {}
        self._errors: dict[tuple[str, str], PluginError] = {}

    def names(self, group: str) -> list[str]:
        """Return all names of a group that are not blocked, loadable or not, sorted."""
        entries = self._entries[group].items()
        return sorted(name for name, (one, *_) in entries if not self.block & {name, one.name})

    def errors(self) -> dict[str, str]:
        """Return the error of each plug-in that has failed to load so far, by ``"group:name"``."""
        return {f"{g}:{n}": str(e) for (g, n), e in sorted(self._errors.items())}

    def installed(self, group: str) -> list[str]:
        """Return all names of a group, including blocked ones, sorted."""
        return sorted(self._entries[group])

    def left_out(self, group: str) -> dict[str, str]:
        """Return the names of a group that are blocked or have failed to load, and why."""
        left = set(self._entries[group]) - set(self.names(group))
        blocked = dict.fromkeys(left, "blocked by configuration")
        broken = {n: str(e) for (g, n), e in self._errors.items() if g == group}
        return {**broken, **blocked}

    def check_installed(
        self, what: str, names: Sequence[str], groups: Sequence[str] = tuple(GROUPS)
    ) -> None:
        """Check that every name belongs to an installed plug-in, even a broken or blocked one.

        Args:
            what: the setting that contains the names, for the error message.
            groups: the groups to which the names may belong.

        Raises:
            ConfigurationError: lists the names that are not installed, and those that are.
        """
        known = {entries[0].name for g in groups for entries in self._entries[g].values()}
        known |= {*self._entries[OBSERVERS]} if OBSERVERS in groups else set()
        unknown = [name for name in names if name not in known]
        if not unknown:
            return
        packages = [OWN_NAMES[g, n] for g in groups for n in unknown if (g, n) in OWN_NAMES]
        near = _near(unknown, known)
        advice = "install its package"
        if packages:
            advice = f"pip install {' '.join(dict.fromkeys(packages))}"
        elif near:
            advice = near
        kind = _kind(groups[0]) if len(groups) == 1 else "plug-in"
        raise ConfigurationError(
            f"{what}: no {kind} is called {', '.join(map(repr, unknown))} (installed: "
            f"{', '.join(sorted(known)) or 'none'}); {advice}, or leave the name out"
        )

    def source(self, group: str, name: str) -> str:
        """Return the distribution (or distributions) that provide a name."""
        return ", ".join(sorted(e.distribution for e in self._entries[group].get(name, [])))

    def load(self, group: str, name: str) -> Any:
        """Return the result of the plug-in's hook (for observers: the plug-in itself), cached.

        Raises:
            PluginError: the plug-in is unknown, blocked, broken, or claimed by two distributions.
        """
        key = (group, name)
        if key in self._errors:
            raise self._errors[key]
        if key not in self._results:
            try:
                self._results[key] = self._load(group, name)
            except PluginError as error:
                self._errors[key] = error
                raise
        return self._results[key]

    def _load(self, group: str, name: str) -> Any:
        kind = _kind(group)
        entries = self._entries[group].get(name, [])
        if self.block & {name, *(entry.name for entry in entries)}:
            raise PluginError(f"{kind} {name!r} is blocked by configuration")
        if not entries:
            known = ", ".join(self.names(group)) or "none"
            near = _near([name], self.names(group))
            package = OWN_NAMES.get((group, name))
            if package is None and group == RUNTIMES and not near and _PACKAGE_PART.match(name):
                package = _NAMED_AFTER + name
            hint = near + "?" if near else "is its package installed here?"
            hint = f"pip install {package}" if package else hint
            raise PluginError(f"no {kind} is called {name!r} (installed: {known}); {hint}")
        if clash := self.clash(group, name):
            raise PluginError(clash)
        try:
            return self._load_entry(group, name, entries[0])
        except PluginError as error:
            if why := misfit(entries[0].distribution):
                raise PluginError(f"{error.message}; {why}") from error.__cause__
            raise

    def _load_entry(self, group: str, name: str, entry: InstalledPlugin) -> Any:
        origin = f"{_kind(group)} {name!r} (from {entry.distribution})"
        was_light = _HEAVY not in sys.modules
        try:
            plugin = entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # see load_class
            raise PluginError(f"{origin} cannot be imported: {error!r}") from error
        if was_light and _HEAVY in sys.modules:
            log.warning(
                "%s imports %s, for which every server needs a second and 200 MB: the module "
                "of its entry point must do without",
                origin,
                _HEAVY,
            )
        return self._call(group, name, plugin, origin)

    def check_transports(self, what: str, names: Sequence[str]) -> None:
        """Check that every name is that of one installed transport, even a broken or blocked one.

        Args:
            what: the setting that contains the names, for the error message.

        Raises:
            ConfigurationError: lists the names that are not installed, and those that are.
            PluginError: several distributions claim a name.
        """
        self.check_installed(what, names, [_TRANSPORTS])
        for name in names:
            if clash := self.clash(_TRANSPORTS, name):
                raise PluginError(f"{what}: {clash}")

    def clashes(self) -> list[str]:
        """Return what there is to say of names that several distributions claim."""
        everything = ((group, name) for group in GROUPS for name in self.names(group))
        return [clash for group, name in everything if (clash := self.clash(group, name))]

    def clash(self, group: str, name: str) -> str:
        """Return why a name of several claimants cannot be used; empty if it can."""
        entries = self._entries[group].get(name, [])
        plain = entries[0].name if entries else name
        who = " and ".join(sorted(e.distribution for e in entries))
        if len(entries) > 1:
            return (
                f"{_kind(group)} {name!r} is claimed by {who}, so neither is used; uninstall one "
                f"of them, or block the name: block=[{name!r}], or TORCHSTORE_BLOCK={name}"
            )
        if plain != name and group != OBSERVERS:
            return (
                f"{_kind(group)} {plain!r} of {who} is not used, because that is a name of "
                f"{self.source(group, plain)}, which is installed, too; uninstall {who}, or have "
                "it renamed"
            )
        return ""

    def _call(self, group: str, name: str, plugin: Any, origin: str) -> Any:
        unique = f"{group}:{name}"
        hook = GROUPS[group]
        try:
            self._manager.register(plugin, name=unique)
            self._manager.check_pending()
        except Exception as error:
            if self._manager.has_plugin(unique):
                self._manager.unregister(name=unique)
            raise PluginError(f"{origin} is not a valid plug-in: {error}") from error
        return self._ask(hook, name, plugin, origin)

    def _ask(self, hook: str, name: str, plugin: Any, origin: str) -> Any:
        """Return the result of a registered plug-in's own hook."""
        found = [
            implementation.function
            for implementation in getattr(self._manager.hook, hook).get_hookimpls()
            if implementation.plugin is plugin
        ]
        if not found:
            raise PluginError(f"{origin} does not implement the hook {hook}")
        callers = self._manager.get_hookcallers(plugin) or []
        if others := sorted(caller.name for caller in callers if caller.name != hook):
            raise PluginError(
                f"{origin} implements {' and '.join(others)}, too, which nobody would call; "
                "each hook needs a module and an entry point of its own"
            )
        if inspect.isclass(plugin) and inspect.isfunction(inspect.getattr_static(plugin, hook)):
            raise PluginError(
                f"{origin}: {hook} is a method of the class {plugin.__name__}; the entry point has "
                "to name an instance of it, or a module"
            )
        if inspect.iscoroutinefunction(found[0]) or inspect.isasyncgenfunction(found[0]):
            raise PluginError(f"{origin}: {hook} must be a plain function, not async")
        if inspect.isgeneratorfunction(found[0]):
            raise PluginError(f"{origin}: {hook} must be a plain function, without a yield")
        if hook == "torchstore_operation":
            return plugin
        try:
            result = found[0]()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # see load_class
            raise PluginError(f"{origin}: its hook {hook} failed: {error!r}") from error
        return _checked(hook, name, result, origin)

    # ---- typed access ---------------------------------------------------------------------

    def transports(self) -> list[TransportSpec]:
        """Return all usable transports. Broken ones are left out (see :meth:`errors`), and so are
        names that are claimed twice (see :meth:`clashes`).
        """
        return self._loaded(_TRANSPORTS)

    def _loaded(self, group: str) -> list[Any]:
        found: list[Any] = []
        for name in self.names(group):
            try:
                found.append(self.load(group, name))
            except PluginError:
                continue
        return found

    def transport(self, name: str) -> TransportSpec:
        """Return the transport of that name. Raises PluginError."""
        spec: TransportSpec = self.load(_TRANSPORTS, name)
        return spec

    def strategy(self, name: str) -> type[Strategy]:
        """Return the strategy class of that name. Raises PluginError."""
        strategy: type[Strategy] = self.load(_STRATEGIES, name)
        return strategy

    def runtimes(self) -> list[RuntimeSpec]:
        """Return all usable runtimes. What is left out is as for :meth:`transports`."""
        return self._loaded(RUNTIMES)

    def runtime(self, name: str) -> RuntimeSpec:
        """Return the runtime of that name. Raises PluginError."""
        spec: RuntimeSpec = self.load(RUNTIMES, name)
        return spec

    def advice(self, mesh: object | None = None) -> str:
        """Return which package this process, or the mesh, may need; empty if nothing is known."""
        names = self.installed(RUNTIMES)
        advice = [spec.advise(names, mesh) for spec in self.runtimes() if spec.advise is not None]
        return "; ".join(filter(None, advice))

    def observers(self) -> dict[str, Callable[..., list[Any]]]:
        """Return the hook ``torchstore_operation`` of every observer that loads, by its name.

        Each hook calls one observer only, so that none can keep the others from being called.
        Observers that do not load are in :meth:`left_out`.
        """
        plugins = {}
        for name in self.names(OBSERVERS):
            try:
                plugins[name] = self.load(OBSERVERS, name)
            except PluginError:
                continue
        everybody = self._manager.get_plugins()
        return {
            name: self._manager.subset_hook_caller("torchstore_operation", everybody - {plugin})
            for name, plugin in plugins.items()
        }


def _checked(hook: str, name: str, result: Any, origin: str) -> Any:
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python would warn, far from here, that it was never awaited
    if hook == "torchstore_strategy":
        if not (isinstance(result, type) and issubclass(result, Strategy)):
            raise PluginError(f"{origin}: {hook} must return a subclass of Strategy")
        if not result.__struct_config__.frozen:
            raise PluginError(f"{origin}: its Strategy must be frozen: it remembers nothing")
        if result.__struct_config__.tag != name:
            raise PluginError(
                f"{origin}: its Strategy needs tag={name!r}, the entry-point name, "
                f"not {result.__struct_config__.tag!r}"
            )
        return result
    expected = TransportSpec if hook == "torchstore_transport" else RuntimeSpec
    if not isinstance(result, expected):
        raise PluginError(f"{origin}: {hook} must return a {expected.__name__}")
    if result.name != name:
        raise PluginError(f"{origin}: it calls itself {result.name!r}; the names must be equal")
    asked = "applies" if isinstance(result, RuntimeSpec) else "bid"
    if not callable(getattr(result, asked)):
        raise PluginError(f"{origin}: its {asked} is a {type(getattr(result, asked)).__name__}")
    return _guarded(result, origin) if isinstance(result, RuntimeSpec) else result


def _guarded(spec: RuntimeSpec, origin: str) -> RuntimeSpec:
    """Return a runtime whose functions fail for nobody: every store of every process asks them. One
    that raises, or returns what it must not, has nothing to say, and is logged once.
    """

    def guard(name: str, kind: Any, otherwise: object) -> Any:
        function = getattr(spec, name)
        if function is None:
            return None

        def ask(*given: object) -> object:
            try:
                result = function(*given)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - see load_class
                why = f"fails: {error!r}"
            else:
                if isinstance(result, kind):
                    return result
                why = f"returns {result!r}"
            text = f"{origin} is left out: its function {name} {why}"
            if text not in _warned:
                _warned.add(text)
                log.warning("%s", text)
            return otherwise

        return ask

    return msgspec.structs.replace(
        spec,
        applies=guard("applies", int | None, None),
        here=guard("here", object, False),
        advise=guard("advise", str | None, ""),
    )
