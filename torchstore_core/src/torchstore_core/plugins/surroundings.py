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
