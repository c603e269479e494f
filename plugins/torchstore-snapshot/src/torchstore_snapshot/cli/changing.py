"""Cleans up, and converts: what changes something. Both are functions of the library, and are
imported only when they are called: to clean up needs no torch.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from torchstore_core.errors import ConfigurationError
from torchstore_snapshot.cli import reports

__all__ = ["collect", "converted"]


def collect(path: str, keep_last: int | None, *, dry_run: bool) -> reports.Collected:
    """Remove what no snapshot and no running take needs. See ``torchstore_snapshot.series.gc``,
    whose errors this raises.
    """
    done = _library("series.gc", "gc")(path, keep_last=keep_last, dry_run=dry_run)
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
    )


def converted(
    source: str, destination: str, *, into: str, overwrite: bool, allow_pickle: bool
) -> reports.Converted:
    """Convert between formats. See ``torchstore_snapshot.converting``, whose errors this raises."""
    start = time.perf_counter()
    done = _library("converting", "convert")(
        source, destination, to=into, overwrite=overwrite, allow_pickle=allow_pickle
    )
    return reports.Converted(
        source=source,
        destination=destination,
        kind=str(getattr(done, "kind", "")),
        into=into,
        nbytes=int(getattr(done, "nbytes", 0)),
        seconds=time.perf_counter() - start,
    )


def _library(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"torchstore_snapshot.{module}"), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"this command needs {error.name}, which is not installed"
        ) from error
