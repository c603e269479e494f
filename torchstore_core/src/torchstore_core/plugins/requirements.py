"""Whether a plug-in's distribution fits the release of the core that is installed beside it.

pip upgrades a package and leaves those beside it that no longer fit. What follows is a name that
cannot be imported, which tells nobody what to install.
"""

from __future__ import annotations

import operator
import re

#: The distribution whose releases those of plug-ins have to fit.
CORE = "torchstore-core"

_CORE_LINE = re.compile(r"torchstore[-_.]core\s*(?:\[[^]]*\])?\s*\(?([^;()]*)", re.I)
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*(\d+(?:\.\d+)*)\s*\Z")
_HOLDS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


def misfit(distribution: str) -> str:
    """Return what to say if a distribution requires another release of the core than the one that
    is installed; empty if it does not, or if that cannot be told. Reads files.

    >>> misfit("torchstore-core")
    ''
    """
    from importlib import metadata  # a server has no use for it, unless something is wrong

    try:
        requires = metadata.requires(distribution) or []
        version, here = metadata.version(distribution), metadata.version(CORE)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: no name at all
        return ""
    for line in requires:
        found = _CORE_LINE.match(line)
        if found is not None and not _fits(here, found[1]):
            return (
                f"{distribution} {version} requires {CORE} {found[1].strip()}, and {here} is "
                "installed: install releases that fit together"
            )
    return ""


def misfit_of(path: str) -> str:
    """Return the same for the distribution that is called as the package of ``"module:Name"`` is.

    >>> misfit_of("torchstore_core.server:Server")
    ''
    """
    return misfit(re.split(r"[.:]", path, maxsplit=1)[0].replace("_", "-"))


def _fits(version: str, bounds: str) -> bool:
    """Tell whether a version lies within bounds, of which only plain comparisons count.

    >>> _fits("0.2.0", ">=0.1.0,<0.2"), _fits("0.1.10", ">=0.1.9,<0.2"), _fits("1.0", "~=2.0")
    (False, True, True)
    """
    here = _numbers(version)
    found = [_BOUND.match(bound.strip()) for bound in bounds.split(",")]
    return all(_HOLDS[one[1]](here, _numbers(one[2])) for one in found if one is not None)


def _numbers(version: str) -> list[int]:
    """Return the release numbers of a version, of which trailing zeros say nothing.

    >>> _numbers("1.2.0rc1"), _numbers("1.2") < _numbers("1.2.3")
    ([1, 2], True)
    """
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in found[0].split(".")] if found is not None else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
