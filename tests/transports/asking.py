"""What tests ask server halves through the links that a client uses."""

from __future__ import annotations

from tests.transports.mailbox import Letter, MailboxLink

import torchstore_core as ts

__all__ = ["ask", "nothing_unfinished"]


async def ask(client: ts.Client, letter: Letter, name: str = "mailbox") -> bytes:
    """What the half of that transport answers."""
    session = await client._joined.session(10)
    (volume,) = session.volumes
    candidate = next(c for c in volume.candidates(1) if c.spec.name == name)
    link = await volume.connect(candidate)
    assert isinstance(link, MailboxLink)
    return await link.ask(letter)


async def nothing_unfinished(client: ts.Client) -> bool:
    """Whether no memory is granted to an unfinished put."""
    return not any(volume.unfinished_bytes for volume in (await client.status()).volumes)
