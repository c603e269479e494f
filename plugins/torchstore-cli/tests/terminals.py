"""The ``torchstore`` script on a terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

__all__ = ["on_a_terminal"]

_SCRIPT = Path(sys.executable).parent / "torchstore"


def on_a_terminal(width: int, *arguments: str, environment: Mapping[str, str]) -> str:
    """Run it to its end; what it wrote to the terminal."""
    ours, its = pty.openpty()
    try:
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        with subprocess.Popen(
            [_SCRIPT, *arguments],
            env={"TERM": "xterm", **environment},
            stdin=subprocess.DEVNULL,
            stdout=its,
            stderr=subprocess.PIPE,
        ) as process:
            os.close(its)
            its = -1
            written = bytearray()
            while data := _read(ours):
                written += data
            _, err = process.communicate(timeout=200)
        assert (process.returncode, err) == (0, b"")
    finally:
        os.close(ours)
        if its >= 0:
            os.close(its)
    return written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""
