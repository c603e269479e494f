"""Over what UCX moves the bytes of a connection, as UCX itself tells.

NIXL passes on neither that nor UCX's endpoints. But UCX keeps a list of its objects, as paths (for
people who mount it as a file system), in which NIXL's agents have their names, and endpoints those
of their addresses; and for an endpoint it tells the transport and the device of each lane
(``ucp_ep_query``). Which lane carries a copy depends on its size, and is not told.

All calls hold the interpreter's lock, and none runs Python code, because UCX locks its list: others
wait for that with the interpreter's lock in their hands.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from torchstore_rdma.plugin import LIBRARY

__all__ = ["Lane", "endpoints", "lanes", "words"]

#: The names of a transport of UCX and of a device, such as ``("rc_mlx5", "mlx5_0:1")``.
Lane = tuple[str, str]

_MOST_LANES = 64
_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
# What UCX's transports are, by how their names begin.
_KINDS = {
    "RDMA": ("rc", "dc", "ud", "srd", "gga"),
    "TCP": ("tcp",),
    "shared memory": ("posix", "sysv", "cma", "knem", "xpmem"),
    "NVLink or PCIe between GPUs": ("cuda_ipc",),
    "this process's own memory": ("self",),
}


class _Named(ctypes.Structure):
    """``ucp_transport_entry_t``."""

    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    """``ucp_ep_attr_t``."""

    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_uint64 * 16),
        ("remote", ctypes.c_uint64 * 16),
        ("entries", ctypes.POINTER(_Named)),
        ("count", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


_Callback = ctypes.PYFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)


def endpoints(agent: str) -> frozenset[int]:
    """The endpoints of an agent of this process, by their addresses. Empty if UCX does not tell."""
    found: list[str] = []
    for worker in _names(f"/ucp/context/{agent}/worker"):
        folder = f"/ucp/context/{agent}/worker/{worker}"
        if "ep" in _names(folder):  # UCX enters them when somebody looks
            found += _names(f"{folder}/ep")
    try:
        return frozenset(int(name, 16) for name in found)
    except ValueError:  # UCX was built so that it gives them names
        return frozenset()


def lanes(endpoint: int) -> list[Lane]:
    """The lanes of an endpoint, each transport and device once. It is one of :func:`endpoints`, and
    nothing has made progress with it since.
    """
    entries = (_Named * _MOST_LANES)()
    asked = _Attributes(
        mask=_TRANSPORTS,
        entries=ctypes.cast(entries, ctypes.POINTER(_Named)),
        count=_MOST_LANES,
        entry_size=ctypes.sizeof(_Named),
    )
    query = _function("libucp", "ucp_ep_query")
    if query is None or query(ctypes.c_void_p(endpoint), ctypes.byref(asked)) != 0:
        return []
    told = [
        (one.transport.decode(), one.device.decode())
        for one in entries[: asked.count]
        if one.transport and one.device
    ]
    return list(dict.fromkeys(told))


def words(told: Iterable[Lane]) -> str:
    """Lanes as text for people; empty if there are none.

    >>> words([("posix", "memory"), ("cma", "memory")])
    'UCX has connected over shared memory (posix/memory, cma/memory)'
    >>> words([("tcp", "eth0"), ("new", "x")])
    'UCX has connected over TCP and new (tcp/eth0, new/x)'
    """
    told = list(told)
    kinds = " and ".join(dict.fromkeys(_kind(transport) for transport, _ in told))
    names = ", ".join(f"{transport}/{device}" for transport, device in told)
    return f"UCX has connected over {kinds} ({names})" if told else ""


def _kind(transport: str) -> str:
    named = (kind for kind, starts in _KINDS.items() if transport.startswith(starts))
    return next(named, transport)


def _names(path: str) -> list[str]:
    """What is in a folder of UCX's list."""
    listed: dict[bytes, None] = {}
    listing = _function("libucs", "ucs_vfs_path_list_dir")
    if listing is not None:
        listing(ctypes.c_char_p(path.encode()), _Callback(listed.setdefault), None)
    return [name.decode() for name in listed]


@functools.cache
def _function(library: str, name: str) -> ctypes._FuncPointer | None:
    """A function of UCX as NIXL has loaded it; None if it has none such."""
    spec = find_spec(LIBRARY[0])
    if spec is None or spec.origin is None:
        return None
    for file in Path(spec.origin).parents[1].glob(f"{LIBRARY[0]}.libs/{library}*.so*"):
        try:
            found: ctypes._FuncPointer = getattr(
                ctypes.PyDLL(str(file), mode=os.RTLD_NOW | os.RTLD_NOLOAD), name
            )
        except (OSError, AttributeError):
            continue
        return found
    return None
