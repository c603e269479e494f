"""Descriptor of the runtime ``monarch``. It does not import Monarch: a process that has not
imported Monarch itself is in no Monarch job.
"""

from __future__ import annotations

import sys

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.runtime import RuntimeSpec


def is_worker() -> bool:
    """Return whether Monarch has started this process to run actors."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and str(spec.name).startswith("monarch.")


def _in_a_job() -> bool:
    """Return whether this process is an actor's or a root client's; asking would make it one."""
    monarch = sys.modules.get("monarch._src.actor.actor_mesh")
    if monarch is None:
        return False
    if is_worker():
        return True
    try:
        return monarch._context.get(None) is not None or monarch._client_context._val is not None
    except AttributeError:  # another version of Monarch keeps these elsewhere
        return True


def _applies(mesh: object | None) -> int | None:
    if mesh is None:
        return 10 if "monarch" in sys.modules else None
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
        find="torchstore_monarch.job:find",
        end="torchstore_monarch.job:end",
        rank="torchstore_monarch.job:rank",
        spmd="torchstore_monarch.spmd.starting:start",
    )
