"""Directories that are removed even if their process is killed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

from torchstore_core.machine.directories import remove_stale, runtime_directory

# Waits for the end of its standard input, which comes when the process at the other end ends, even
# by `kill -9`. Then it removes the directory, if that still exists.
_SWEEP = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"'


class SweptDirectory:
    """A fresh private directory for sockets.

    The engine ends its processes without warning when its root is gone. A shell of a few hundred
    kilobytes, which waits beside the process, removes what the process leaves behind.
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
        """Remove the directory, and wait for the shell to end. Idempotent."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if sweeper.stdin is not None:
            sweeper.stdin.close()
        sweeper.wait()
