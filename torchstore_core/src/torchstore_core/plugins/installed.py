"""Finds the installed plug-ins, built-in ones too, through their entry points."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from torchstore_core.machine.sockets.unix import check_descriptors

if TYPE_CHECKING:
    from importlib import metadata

log = logging.getLogger(__name__)

#: Entry-point group of the observers, which are told of operations.
OBSERVERS = "torchstore.plugins"
#: Entry-point group of the runtimes.
RUNTIMES = "torchstore.runtimes"
#: Entry-point group of each kind of plug-in, and the hook that its modules implement.
GROUPS = {
    "torchstore.transports": "torchstore_transport",
    "torchstore.strategies": "torchstore_strategy",
    RUNTIMES: "torchstore_runtime",
    OBSERVERS: "torchstore_operation",
}

_ENTRY_POINTS = "entry_points.txt"
_NAME = re.compile(r"^name:\s*(\S+)", re.IGNORECASE | re.MULTILINE)
# A folder that was changed less long ago may be changed again and keep its time stamp.
_SETTLED_NS = 1_000_000_000
# The plug-ins that were found last, and when each folder of the path had last been changed.
_remembered: tuple[dict[str, int], list[InstalledPlugin]] | None = None


class InstalledPlugin(msgspec.Struct, frozen=True):
    """The entry point of a plug-in that is installed.

    Args:
        group: one of ``GROUPS``.
        name: what the plug-in is called.
        value: where it is: ``"module"`` or ``"module:attribute"``.
        distribution: the name of the distribution that contains it.
        folder: the folder of ``sys.path`` that the distribution is in; empty: not known.

    >>> InstalledPlugin("torchstore.transports", "clock", "time:monotonic").load()() > 0
    True
    """

    group: str
    name: str
    value: str
    distribution: str = "an unknown distribution"
    folder: str = ""

    @classmethod
    def of(cls, entry: metadata.EntryPoint) -> InstalledPlugin:
        """Return what an entry point of ``importlib.metadata`` says."""
        if entry.dist is None:
            return cls(entry.group, entry.name, entry.value)
        folder = os.path.abspath(str(entry.dist.locate_file("")))
        return cls(entry.group, entry.name, entry.value, _name_of(entry.dist), folder)

    @property
    def identity(self) -> tuple[str, str]:
        """What two entries of one plug-in have in common, wherever they were found."""
        return self.value, self.distribution

    def load(self) -> Any:
        """Import the plug-in and return it. Raises whatever its module raises."""
        path = self.value.partition("[")[0]  # what follows are the names of extras
        module, _, attributes = path.partition(":")
        names = attributes.split(".") if attributes.strip() else []
        loaded = importlib.import_module(module.strip())
        return functools.reduce(getattr, (name.strip() for name in names), loaded)


def installed() -> list[InstalledPlugin]:
    """Return the installed plug-ins of all groups, which are looked up again when a folder of the
    path has changed.

    Raises:
        TransportNotReadyError: this process has no file descriptor left to look for any.
    """
    global _remembered
    check_descriptors("the list of installed plug-ins")
    now = time.time_ns()
    changed = {path: _changed(path) for path in sys.path}
    remembered = _remembered
    if remembered is not None and remembered[0] == changed:
        return remembered[1]
    found = list(_search())
    # Those of a later time than now are from before the clock was set back, or of another host.
    settled = all(abs(now - then) > _SETTLED_NS for then in changed.values())
    _remembered = (changed, found) if settled else None
    return found


class Inventory(msgspec.Struct, frozen=True):
    """The plug-ins that a process has found, told to a server that it starts.

    Args:
        path: the folders in which it looked.
        plugins: what it found there.
    """

    path: tuple[str, ...]
    plugins: tuple[InstalledPlugin, ...]

    @classmethod
    def taken(cls) -> Inventory:
        """Return what this process finds. Raises what :func:`installed` raises."""
        return cls(tuple(sorted(_searched())), tuple(installed()))

    def is_valid_here(self) -> bool:
        """Tell whether this process would find the same plug-ins.

        It does not if the other one also looked in its program's own folder, which is not on a
        server's path, and found some there; nor if ``PYTHONPATH`` has been changed since the other
        one was started, and something is installed where only this one looks.
        """
        path = _searched()
        new = path - {*self.path}
        return all(plugin.folder in path for plugin in self.plugins) and not any(map(_holds, new))


def _searched() -> set[str]:
    try:
        here = os.getcwd()
    except FileNotFoundError:  # somebody has removed it: nothing can be found there
        here = ""
    return {
        os.path.normpath(os.path.join(here, folder))
        for folder in sys.path
        if here or os.path.isabs(folder)
    }


def _holds(folder: str) -> bool:
    """Tell whether a distribution may be installed in a folder, or in an archive in its place."""
    try:
        return any(name.endswith((".dist-info", ".egg-info")) for name in os.listdir(folder))
    except NotADirectoryError:
        return True
    except OSError:
        return False


def _changed(path: str) -> int:
    """Return when a folder was last changed; 0 if there is none."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


def _search() -> Iterator[InstalledPlugin]:
    """Yield the installed plug-ins of all groups. If a distribution is on the path twice, the first
    one counts, as it does for import.
    """
    # Not at the top: a server is told what there is to find, and saves 1.5 MB of modules.
    from importlib import metadata

    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text(_ENTRY_POINTS) or ""
            if not any(group in text for group in GROUPS):
                continue
            name = _name_of(distribution).lower().replace("_", "-")
            found = [InstalledPlugin.of(e) for e in distribution.entry_points if e.group in GROUPS]
            try:
                first = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                # Its folder is named so that a search by name does not find it, as tools wrote them
                # before there was a rule.
                first = distribution
            is_first = first.read_text(_ENTRY_POINTS) == text
        except Exception:
            log.warning("unreadable metadata of an installed package", exc_info=True)
            continue
        if is_first and name not in seen:
            seen.add(name)
            yield from found


def _name_of(distribution: metadata.Distribution) -> str:
    """Return the name. Parsing all metadata would take five times as long as everything else."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    found = _NAME.search(text)
    return found[1] if found is not None else str(distribution.metadata["Name"] or "")
