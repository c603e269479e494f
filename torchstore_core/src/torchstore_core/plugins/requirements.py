"""Whether a plug-in's distribution fits the release of the core that is installed beside it.

pip upgrades a package and leaves those beside it that no longer fit. What follows is a name that
cannot be imported, which tells nobody what to install.
"""

from __future__ import annotations

import re

#: The distribution whose releases those of plug-ins have to fit.
CORE = "torchstore-core"


def misfit(distribution: str) -> str:
    """Return what to say if a distribution requires another release of the core than the one that
    is installed; empty if it does not, or if that cannot be told. Reads files.

    >>> misfit("torchstore-core")
    ''
    """
    try:
        return _misfit(distribution)
    except Exception:  # noqa: BLE001 - no such distribution, no descriptor left: nothing to add
        return ""


def _misfit(distribution: str) -> str:
    # A server has no use for them, unless something is wrong.
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    version, here = metadata.version(distribution), metadata.version(CORE)
    for line in metadata.requires(distribution) or []:
        wanted = Requirement(line)
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if canonicalize_name(wanted.name) != CORE or not applies:
            continue
        if not wanted.specifier.contains(here, prereleases=True):
            return (
                f"{distribution} {version} requires {CORE} {wanted.specifier}, and {here} is "
                "installed: install releases that fit together"
            )
    return ""


def misfit_of(path: str) -> str:
    """Return the same for the distribution that is called as the package of ``"module:Name"`` is.

    >>> misfit_of("torchstore_core.server:Server")
    ''
    """
    return misfit(re.split(r"[.:]", path, maxsplit=1)[0].replace("_", "-"))
