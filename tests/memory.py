"""How much memory a process has, by what the kernel says of it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["forget_peak", "peak", "rss"]


def rss(pid: int | str = "self") -> int:
    """Resident bytes of a process, without the shared memory it has touched."""
    return _bytes(pid, "RssAnon")


def peak(pid: int | str = "self") -> int:
    """The most bytes that a process has had resident since :func:`forget_peak`, those of shared
    memory included.
    """
    return _bytes(pid, "VmHWM")


def forget_peak(pid: int | str = "self") -> int:
    """Let :func:`peak` begin anew; what it gives now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


def _bytes(pid: int | str, field: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields[field].split()[0]) << 10
