"""Cleans up, and converts: what changes something. Both are functions of the library, and are
imported only when they are called: to clean up needs no torch.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from torchstore_core.errors import TorchStoreError
from torchstore_snapshot.cli import reports
from torchstore_snapshot.errors import SnapshotNotFoundError
from torchstore_snapshot.storage.settings import current

if TYPE_CHECKING:
    from torchstore_snapshot.converting import Kind

__all__ = ["collect", "converted"]

# An argument of the function that the text of an error names.
_ARGUMENT = re.compile(r"\b(?:(overwrite|allow_pickle)=True\b|(key|rank)=$)")


def collect(path: str, keep_last: int | None, *, dry_run: bool) -> reports.Collected:
    """Remove what no snapshot and no running take needs. See ``torchstore_snapshot.series.gc``,
    whose errors this raises.

    Raises:
        SnapshotNotFoundError: there is no such folder. (A program may clean up before its first
            take; who writes a command has misspelt the path.)
    """
    from torchstore_snapshot.series.gc import gc
    from torchstore_snapshot.storage.local import LocalStorage
    from torchstore_snapshot.storage.opening import open_storage

    storage = open_storage(path)
    if isinstance(storage, LocalStorage) and not os.path.exists(storage.url):
        raise SnapshotNotFoundError(
            f"there is no folder {storage.url!r}", details={"path": storage.url}
        )
    done = gc(path, keep_last=keep_last, dry_run=dry_run, storage_options=current())
    return reports.Collected(
        path=done.path,
        dry_run=done.dry_run,
        nbytes=done.nbytes,
        dropped=list(done.dropped),
        kept=list(done.kept),
        files=[f"{file.snapshot}/{file.name}" for file in done.files],
        running=list(done.running),
        dead=list(done.dead),
        unreadable=dict(done.unreadable),
        held=dict(done.held),
        mended=list(done.mended),
    )


def converted(
    source: str,
    destination: str,
    *,
    into: Kind,
    key: str | None,
    rank: int | None,
    overwrite: bool,
    allow_pickle: bool,
) -> reports.Converted:
    """Convert between formats. See ``torchstore_snapshot.converting``, whose errors this raises,
    with the options of the command line in their texts.
    """
    from torchstore_snapshot.converting import convert

    start = time.perf_counter()
    try:
        done = convert(
            source,
            destination,
            to=into,
            key=key,
            rank=rank,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            storage_options=current(),
        )
    except TorchStoreError as error:
        text = _ARGUMENT.sub(
            lambda found: "--" + (found[1] or found[2]).replace("_", "-"), error.message
        )
        raise type(error)(text, key=error.key, details=error.details) from error
    return reports.Converted(
        source=source,
        destination=destination,
        kind=done.source,
        into=done.destination,
        tensors=done.tensors,
        objects=done.objects,
        nbytes=done.nbytes,
        seconds=time.perf_counter() - start,
    )
