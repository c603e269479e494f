"""``python -m torchstore_core.clients.copying``: the process of a copier."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from torchstore_core.clients.copying.copier import copy_for
from torchstore_core.errors import StoreClosedError

_NICE = 10


class _Order(msgspec.Struct, frozen=True):
    """The command-line argument: the address of the store, and the volumes to copy into."""

    address: str
    volumes: list[int]


def main() -> None:
    """Copy until there is nothing to do, or the store is gone."""
    order = msgspec.json.decode(sys.argv[1], type=_Order)
    os.nice(_NICE)  # readers and writers come first
    with contextlib.suppress(StoreClosedError):  # it needs no copies any more
        asyncio.run(copy_for(order.address, order.volumes))


if __name__ == "__main__":
    main()
    # All is closed. To take down what a transport's library has loaded may take long.
    os._exit(0)
