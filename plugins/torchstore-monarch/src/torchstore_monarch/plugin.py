"""Descriptor of the runtime ``monarch``. Imports nothing of Monarch: a process that has not
imported it itself is in no Monarch job.
"""

from __future__ import annotations

import sys

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.runtime import RuntimeSpec


def _in_a_job() -> bool:
    return "monarch" in sys.modules


def _applies(mesh: object | None) -> int | None:
    if mesh is None:
        return 10 if _in_a_job() else None
    root = type(mesh).__module__.partition(".")[0]
    return 10 if root == "monarch" else None


@hookimpl
def torchstore_runtime() -> RuntimeSpec:
    """See ``torchstore_core.contracts.hooks``."""
    return RuntimeSpec(
        "monarch",
        "torchstore_monarch.runtime:MonarchRuntime",
        _applies,
        here=_in_a_job,
        find="torchstore_monarch.finding:find",
        end="torchstore_monarch.finding:end",
        rank="torchstore_monarch.finding:rank",
        spmd="torchstore_monarch.spmd.starting:start",
    )
