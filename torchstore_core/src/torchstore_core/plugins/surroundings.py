"""What is around a process: versions of what both ends of a link need, and NUMA nodes. Torch-free.

No bid uses it. ``torchstore doctor --peer`` asks a volume for it, by a handshake that names no
transport.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from importlib import metadata

import msgspec

from torchstore_core.machine.numa import Numa, probe_numa
from torchstore_core.plugins.registry import Registry

__all__ = ["Surroundings", "differences", "surroundings"]

_CORE = "torchstore-core"
_TRANSPORTS = "torchstore.transports"


class Surroundings(msgspec.Struct, frozen=True):
    """What is around a process.

    Args:
        versions: the versions of Python and of distributions, without those that are missing.
        needs: which distributions are at both ends of a transport, by the name of each that may be
            used: its own package, and its libraries.
    """

    versions: dict[str, str] = {}
    needs: dict[str, tuple[str, ...]] = {}
    numa: Numa = Numa()


def surroundings(registry: Registry) -> Surroundings:
    """Return what is around this process. Reads some files: not for event loops."""
    specs = {spec.name: spec for spec in registry.transports()}
    needs = {
        name: (registry.source(_TRANSPORTS, name), *spec.libraries) for name, spec in specs.items()
    }
    every = {_CORE, *(distribution for needed in needs.values() for distribution in needed)}
    versions = {"python": platform.python_version(), **dict(_versions(sorted(every)))}
    return Surroundings(versions, needs, probe_numa())


def _versions(distributions: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in distributions:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def differences(here: Surroundings, there: Surroundings) -> list[str]:
    """Return where versions differ in a way that matters, as text for people: of the core, and of
    transports that both sides may use.

    >>> one = Surroundings({"nixl": "1.5"}, {"rdma": ("nixl",)})
    >>> differences(one, Surroundings({}, one.needs))
    ["nixl is 1.5 here and missing there: 'rdma' needs it at both ends"]
    """
    found: list[str] = []
    both = {
        name: {*here.needs[name], *there.needs[name]} for name in here.needs.keys() & there.needs
    }
    for name in sorted({*here.versions, *there.versions}):
        one, other = here.versions.get(name), there.versions.get(name)
        if one == other:
            continue
        differ = f"{name} is {one or 'missing'} here and {other or 'missing'} there"
        users = sorted(transport for transport, needed in both.items() if name in needed)
        who = ", ".join(map(repr, users))
        if name == _CORE:
            found.append(f"{differ}: install the same release on both hosts")
        elif users and one and other:
            found.append(f"{differ}: both ends of {who} use it; install the same on both hosts")
        elif users:
            found.append(f"{differ}: {who} needs it at both ends")
    return found
