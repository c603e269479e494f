"""Cleans up, and converts."""

from __future__ import annotations

from torchstore_snapshot.cli import reports

__all__ = ["collect", "converted"]


def collect(path: str, keep_last: int | None, *, dry_run: bool) -> reports.Collected:
    raise NotImplementedError


def converted(
    source: str, destination: str, *, into: str, overwrite: bool, allow_pickle: bool
) -> reports.Converted:
    raise NotImplementedError
