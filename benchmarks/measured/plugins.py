"""Plug-ins of the benchmarks: an observer of this process, and how any of them is installed."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.observer import Operation


class InstalledPlugin:
    """A plug-in that stores and clients find from now on, those of child processes included.

    It is found as every plug-in is: through an entry point, here of a distribution that is only a
    folder with a few lines of metadata.
    """

    def __init__(self, group: str, name: str, module: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torchstore-bench-")
        info = Path(self._folder.name) / f"torchstore_bench_{name}-1.dist-info"
        info.mkdir()
        about = f"Metadata-Version: 2.1\nName: torchstore-bench-{name}\nVersion: 1\n"
        (info / "METADATA").write_text(about)
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
        sys.path.append(self._folder.name)
        self._before = os.environ.get("PYTHONPATH")
        # Of child processes: `module` is below this program's folder, the metadata in the other.
        folders = (self._before, str(Path(__file__).parents[1]), self._folder.name)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))

    def remove(self) -> None:
        """What starts from now on does not find it."""
        sys.path.remove(self._folder.name)
        if self._before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self._before
        self._folder.cleanup()


class Observer:
    """Notes the operations of this process's clients that are made afterwards."""

    def __init__(self) -> None:
        self._plugin = InstalledPlugin("torchstore.plugins", "observer", __name__)

    def close(self) -> None:
        """Clients that are made from now on are not observed."""
        self._plugin.remove()

    def moved(self, name: str) -> int:
        """Bytes that operations of this name moved since the last call."""
        seen, _seen[:] = list(_seen), []
        return sum(operation.nbytes for operation in seen if operation.name == name)


_seen: list[Operation] = []


@hookimpl
def torchstore_operation(operation: Operation) -> None:
    """Called after every operation."""
    _seen.append(operation)
