"""``python -m torchstore_core.clients.copying``: the process of a copier."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from torchstore_core.clients.copying.copier import copy_for
from torchstore_core.errors import ProtocolError, StoreClosedError

_NICE = 10


class _Order(msgspec.Struct, frozen=True):
    """The command-line argument: the address of the store, and the volumes to copy into."""

    address: str
    volumes: list[int]


def main() -> int:
    """Copy until there is nothing to do, or the store is gone; returns the exit status."""
    order = msgspec.json.decode(sys.argv[1], type=_Order)
    os.nice(_NICE)  # readers and writers come first
    with contextlib.suppress(StoreClosedError):  # it needs no copies any more
        try:
            asyncio.run(copy_for(order.address, order.volumes))
        except ProtocolError as error:
            text = (
                f"torchstore copier {os.getpid()}: this store cannot make copies any more, neither "
                "after a loss nor to drain a volume, until it is restarted: another release was "
                f"installed while it ran ({error.message})\n"
            )
            sys.stderr.write(text)  # which is where the server logs
            sys.stderr.flush()
            return 1
    return 0


if __name__ == "__main__":
    status = main()
    # All is closed. To take down what a transport's library has loaded may take long.
    os._exit(status)
