"""Measured latencies and rates of transports between two hosts, which replace those they bid.

``torchstore bench --transports --save`` measures and saves them; from then on, bids contain the
measured figures and say so. Hosts are identified by their boot ids, so a measurement no longer
applies after either host has been restarted. Nor does one over the loopback apply between network
namespaces of one host, or one over some addresses between others.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from torchstore_core.contracts.transport import Bid
from torchstore_core.machine.topology import Topology

log = logging.getLogger(__name__)

_VARIABLE = "TORCHSTORE_CALIBRATION"
#: What a measurement applies to: a transport's name, the host ids of the client and of the volume,
#: and the way between them.
Link = tuple[str, str, str, str]


class Calibration(msgspec.Struct, frozen=True, array_like=True):
    """A measurement of a link: the same figures as in a ``Bid``, and when they were measured, in
    seconds since the epoch.
    """

    latency_s: float
    bytes_per_s: float
    at: float


def link_of(transport: str, client: Topology, volume: Topology) -> Link:
    """Return the link of a transport between two processes. The way is ``loopback`` within one
    network namespace, else the addresses of both sides.
    """
    if client.namespace and client.namespace == volume.namespace:
        way = "loopback"
    else:
        sides = (sorted(one.address for one in place.networks) for place in (client, volume))
        way = ">".join(",".join(side) for side in sides)
    return transport, client.host_id, volume.host_id, way


def calibration_file() -> Path:
    """Return the file of measurements: ``TORCHSTORE_CALIBRATION``, or one in the user's cache."""
    given = os.environ.get(_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "torchstore" / "calibration.json"


def save(measured: Mapping[Link, Calibration]) -> Path:
    """Save measurements to the file, in place of earlier ones of the same links; return its path.

    Raises:
        OSError: the file cannot be written, or is a device or something else of that kind.
    """
    path = calibration_file()
    _check_kind(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    everything = {**_read(path), **{_joined(link): one for link, one in measured.items()}}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(everything)))
    draft.replace(path)
    return path


def corrected(bid: Bid, link: Link) -> Bid:
    """Return the bid with the figures measured on that link; the bid itself if there are none."""
    path = calibration_file()
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return bid
    one = _known(str(path), changed).get(_joined(link))
    if one is None:
        return bid
    day = time.strftime("%Y-%m-%d", time.localtime(one.at))
    return Bid(one.latency_s, one.bytes_per_s, f"{bid.reason}; figures measured here on {day}")


def _joined(link: Link) -> str:
    return " ".join(link)


@functools.lru_cache(maxsize=4)
def _known(path: str, changed: int) -> dict[str, Calibration]:
    return _read(Path(path))


def _check_kind(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _read(path: Path) -> dict[str, Calibration]:
    try:
        _check_kind(path)  # to read a pipe would wait for ever
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Calibration])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the measurements in %s cannot be used: %s", path, error)
        return {}
    now = time.time()
    return {
        link: one
        for link, one in found.items()
        if one.latency_s >= 0 and one.bytes_per_s > 0 and 0 <= one.at <= now
    }
