"""Virtual environments with one package and what its metadata name, and nothing else.

Nothing is installed: what is in this interpreter's environment is linked into the new one. So no
package index is needed, and a package that imports what it does not declare fails.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["Alone", "closure"]


def closure(names: Iterable[str]) -> dict[str, Distribution]:
    """Distributions, and all that they require; names may have extras, like ``a[b]``."""
    found: dict[str, Distribution] = {}
    done: set[str] = set()
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        if str(wanted) in done:
            continue
        done.add(str(wanted))
        distribution = found[wanted.name] = importlib.metadata.distribution(wanted.name)
        for line in distribution.requires or ():
            needed = Requirement(line)
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            if needed.marker is None or any(needed.marker.evaluate(one) for one in extras):
                todo.append(needed)
    return found


class Alone:
    """A virtual environment in an empty directory.

    Args:
        names: what is to be in it, with all that that requires.
    """

    def __init__(self, base: Path, names: Iterable[str]) -> None:
        venv.create(base, symlinks=True, with_pip=False)
        self.python = base / "bin/python"
        self.distributions: dict[str, Distribution] = {}
        (self._site,) = base.glob("lib/python*/site-packages")
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
        """Put more into it."""
        for name, distribution in closure(names).items():
            self.distributions[name] = distribution
            for path in _parts(distribution):
                link = self._site / path.name
                if not link.exists():
                    link.symlink_to(path)

    def run(self, *arguments: str, cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run its interpreter, with nothing of this one's environment."""
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def _parts(distribution: Distribution) -> set[Path]:
    """What there is of a distribution in a site directory; of one that is installed in place, what
    is in its sources.
    """
    site = Path(str(distribution.locate_file("")))
    names = {file.parts[0] for file in distribution.files or ()}
    found = {site / name for name in names if name not in ("..", "__pycache__")}
    for pth in [path for path in found if path.name.startswith("__editable__")]:
        found.remove(pth)
        source = Path(pth.read_text().strip())
        found |= {path for path in source.iterdir() if not path.name.endswith(".egg-info")}
    return {path for path in found if path.exists() and path.suffix != ".pth"}
