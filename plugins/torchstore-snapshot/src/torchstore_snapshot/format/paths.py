"""Names of files in a snapshot, and which names a manifest may contain."""

from __future__ import annotations

import os
import re
import time
from typing import NamedTuple

from torchstore_core.errors import ConfigurationError
from torchstore_snapshot.errors import SnapshotFormatError
from torchstore_snapshot.format.owners import OWNER, has_ended, owner

__all__ = [
    "MANIFEST",
    "Temporary",
    "check_file_name",
    "check_name",
    "claim_file",
    "data_file",
    "new_take_id",
    "part_file",
    "plain_name",
    "take_of",
    "temporary",
    "temporary_of",
]

#: The name of the manifest. A folder is a snapshot if, and only if, it contains this file.
MANIFEST = "snapshot.json"

_TAKE = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}")
_TEMPORARY = re.compile(
    rf"\.(?P<name>.+)-(?P<take>{_TAKE.pattern})\.(?P<owner>{OWNER.pattern})\.[0-9a-f]{{8}}\.tmp"
)
# All the names that the functions below make, and no others: gc removes such files.
_OF_TAKE = re.compile(
    rf".*-({_TAKE.pattern})-\d+-\d+\.safetensors"
    rf"|\.(?:part|claim)-({_TAKE.pattern})(?:-\d+)?\.json"
    rf"|{_TEMPORARY.pattern}"
)
_UNSAFE = re.compile(r"[^A-Za-z0-9_]+")


def new_take_id() -> str:
    """Return an id that no other take has. Ids of later takes are greater.

    >>> len(new_take_id())
    21
    """
    return f"{time.time_ns() // 1_000_000:012x}-{os.urandom(4).hex()}"


def data_file(key: str, take: str, rank: int, number: int) -> str:
    """Return the name of a data file.

    >>> data_file("model", "0195d0a2b3c4-00c0ffee", 0, 2)
    'model-0195d0a2b3c4-00c0ffee-0-2.safetensors'
    """
    return f"{plain_name(key)}-{take}-{rank}-{number}.safetensors"


def plain_name(key: str) -> str:
    """Return a part of a file's name that shows which state dict is in it.

    >>> plain_name("my/model")
    'my_model'
    """
    return _UNSAFE.sub("_", key)[:64]


def part_file(take: str, rank: int) -> str:
    """Return the name of the file in which a rank reports what it has written."""
    return f".part-{take}-{rank}.json"


def claim_file(take: str) -> str:
    """Return the name of the file that says that a take is running.

    >>> take_of(claim_file("0195d0a2b3c4-00c0ffee"))
    '0195d0a2b3c4-00c0ffee'
    """
    return f".claim-{take}.json"


def temporary(name: str, take: str) -> str:
    """Return a name under which a file is written before it is renamed to ``name``. It is a new one
    each time: a process that was killed may have left another. It says which process that was.
    """
    return f".{name}-{take}.{owner()}.{os.urandom(4).hex()}.tmp"


class Temporary(NamedTuple):
    """What the name of a temporary file or folder says.

    Args:
        name: what it would be renamed to.
        orphaned: the process that has made it was one of this host, and does not run any more.
    """

    name: str
    orphaned: bool


def temporary_of(name: str) -> Temporary | None:
    """Return what a name that :func:`temporary` has made says; None for any other name."""
    found = _TEMPORARY.fullmatch(name)
    return None if found is None else Temporary(found["name"], has_ended(found["owner"]))


def take_of(name: str) -> str | None:
    """Return the id of the take that wrote a file; None if the file was not written by a take.

    >>> take_of("model-0195d0a2b3c4-00c0ffee-0-2.safetensors"), take_of("config.json")
    ('0195d0a2b3c4-00c0ffee', None)
    """
    found = _OF_TAKE.fullmatch(name)
    return None if found is None else found["take"] or found[1] or found[2]


def check_name(argument: str, name: object) -> None:
    """Raise ConfigurationError unless an argument is a non-empty str, or None."""
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigurationError(f"{argument} is a non-empty str, or None, not {name!r}")


def check_file_name(name: str, path: str) -> str:
    """Return ``name`` if it is that of a file directly inside a folder.

    Raises:
        SnapshotFormatError: it leads anywhere else, or is the name of the manifest. ``path`` is the
            snapshot that contains the name, for the error.
    """
    if (
        not name
        or name in (".", "..", MANIFEST)
        or "/" in name
        or "\\" in name
        or "\0" in name
        or len(name.encode("utf-8", "replace")) > 255
    ):
        raise SnapshotFormatError(
            f"the manifest of {path!r} names {name!r} as a file of the snapshot, which it cannot "
            "be; the manifest was damaged or forged",
            details={"path": path, "file": name},
        )
    return name
