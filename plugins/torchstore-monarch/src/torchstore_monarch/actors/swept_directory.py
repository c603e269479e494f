"""Directories that are removed however their process ends."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

from torchstore_core.machine.directories import remove_stale, runtime_directory

__all__ = ["SweptDirectory"]

# Waits for the end of its standard input, which is the end of the process that holds the other
# end, by `kill -9` too. Then the directory goes, unless it went already.
_SWEEP = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"'


class SweptDirectory:
    """A fresh private directory for sockets.

    The engine ends its processes without a word to them when its root is gone; a shell of a few
    hundred kilobytes, waiting beside the process, removes what it leaves.
    """

    def __init__(self) -> None:
        base = runtime_directory()
        remove_stale(base)
        self.path = tempfile.mkdtemp(dir=base)
        self._sweeper: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["/bin/sh", "-c", _SWEEP, "torchstore-sweeper", self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def remove(self) -> None:
        """Remove it, and wait for the shell. Idempotent."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if sweeper.stdin is not None:
            sweeper.stdin.close()
        sweeper.wait()
