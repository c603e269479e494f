"""Descriptor of ``mailbox-apart``: see :mod:`tests.transports.mailbox`."""

from __future__ import annotations

import msgspec
from tests.transports import mailbox

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import TransportSpec


def _offer() -> bytes:
    return b"mailbox"


@hookimpl
def torchstore_transport() -> TransportSpec:
    """See ``torchstore_core.contracts.hooks``."""
    spec = mailbox.torchstore_transport()
    return msgspec.structs.replace(spec, name="mailbox-apart", isolated=True, offer=_offer)
