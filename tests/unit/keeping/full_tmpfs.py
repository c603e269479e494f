"""Fills the file system in the argument with a log, which must notice, and not be killed."""

import contextlib
import os
import sys
import tempfile

del os.memfd_create
tempfile.tempdir = sys.argv[1]

from torchstore_core.errors import StoreFullError  # noqa: E402
from torchstore_core.server.keeping.log import SPARE, Log  # noqa: E402

log = Log()
count = 0
try:
    while True:
        log.append(1, 1, bytes(5000), SPARE)
        count += 1
except StoreFullError as error:
    why = error.details["reason"]
assert why == "No space left on device", why
assert 400 < count < 700, count
for _ in range(SPARE // 32):
    log.append(2, 1, bytes(8))  # for which there is room, in any case
with contextlib.suppress(StoreFullError):
    while True:
        log.append(3, 1, bytes(100))
with contextlib.suppress(StoreFullError):
    Log()
other = Log(os.dup(log.fd))
with contextlib.suppress(StoreFullError):  # also the next life
    while True:
        other.append(4, 1, b"")
kinds = [record.kind for record in other]
assert kinds.count(1) == count
assert kinds.count(2) == SPARE // 32
